#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"
#include "../tape/edit.h"
#include "../ops/record.h"
#include "../ops/linear/rules.h"
#include "../ops/rules.h"

/* ------------------------------------------------------------------------------------------------ overlap
   Runs transfers beside computation, on their own streams: copies between memories, and the gathers and sums
   of data ranks within a micro-batch. Each transfer is split into a start and a WAIT. If the transfer brings
   a value that computation needs, its start moves up, as far as its stream needs to finish in time. If the
   transfer takes a result away, its WAIT moves down to where the transfer ends. Only the order of
   instructions changes, never a result: wrong costs only make a step slower or larger. */

/* X(field, default) for each field of tt_costs, in FLOPs or bytes a second; the last two in seconds. */
#define TT__COSTS(X) \
    X(product_16, 300e12) X(product_f32, 60e12) X(attention_16, 300e12) X(attention_f32, 60e12) \
    X(rows_16, 2e12) X(rows_f32, 2e12) X(update_16, 2e12) X(update_f32, 2e12) X(update_host, 50e9) \
    X(memory, 2e12) X(to_host, 25e9) X(from_host, 25e9) X(between_ranks, 50e9) X(launch, 3e-6) \
    X(barrier, 25e-6)

tt_costs tt_costs_default(void)
{
    tt_costs c;
#define TT__COST(name, standard) c.name = standard;
    TT__COSTS(TT__COST)
#undef TT__COST
    return c;
}

/* Fails if a cost is not finite, a number of seconds is below 0, or a rate is not above 0. */
static tt_status tt__check_costs(tt_context *ctx, const tt_costs *c)
{
#define TT__COST(name, standard) {#name, c->name},
    const struct { const char *name; double value; } costs[] = {TT__COSTS(TT__COST)};
#undef TT__COST
    char text[1024];
    tt__text_buffer all = {text, sizeof text, 0};
    for (int k = 0; k < TT__COUNT(costs); k++) {
        const double value = costs[k].value;
        const bool seconds = k >= TT__COUNT(costs) - 2;
        if ((seconds ? value >= 0 : value > 0) && isfinite(value)) continue;
        tt__print(&all, "; %s is %g, but must be a finite number %s", costs[k].name, value,
                  seconds ? "of seconds" : "above 0");
    }
    return all.length ? tt__fail(ctx, TT_ERR_ARGUMENT, "costs: %s", text + 2) : TT_OK;
}

/* Returns the stream beside computation on which i could run; TT__COMPUTE_STREAM if there is none. */
static int tt__stream_beside(const tt_tape *t, const tt__instr *i)
{
    const tt__tape_value *x = &t->values[i->in[0]], *y = &t->values[i->out[0]];
    if (i->out[0] && i->move.over == TT__OVER_STAGES && i->move.from != i->move.to) return TT__RANKS_STREAM;
    if (!i->in[0] || !i->out[0] || tt__is(i, TT__WAITS)) return TT__COMPUTE_STREAM;
    if (tt__is(i, TT__ANY_SPACE) && x->space != y->space)
        return y->space == TT__HOST ? TT__OUT_STREAM : TT__IN_STREAM;
    return tt__rules_of(i)->phases ? (int)TT__RANKS_STREAM : (int)TT__COMPUTE_STREAM;
}

static double tt__operand_bytes(const tt_tape *t, int32_t v)
{
    const tt__shape *s = &t->values[v].shape;
    return v ? (double)tt__matrix_bytes(s->dtype, s->rows, s->cols) : 0;
}

/* Returns the bytes that instruction i reads and writes. In a table that is looked up, only the rows looked
   up count. */
static double tt__touched_bytes(const tt_tape *t, const tt__instr *i)
{
    const int table = tt__rules_of(i)->table;
    double bytes = 0;
    for (int j = 0; j < TT__MAX_IN; j++)
        bytes += tt__operand_bytes(t, table && j == table ? i->out[0] : i->in[j]);
    for (int j = 0; j < TT__MAX_OUT; j++)
        bytes += (i->add >> j & 1 || tt__is(i, TT__RMW) ? 2 : 1) * tt__operand_bytes(t, i->out[j]);
    return bytes;
}

/* Returns the bytes that the busiest member of collective i loads. */
static double tt__loaded_bytes(const tt_tape *t, const tt__instr *i)
{
    const tt__tape_value *x = &t->values[i->in[0]], *y = &t->values[i->out[0]];
    const int64_t elements = tt__max(x->shape.rows * x->shape.cols, y->shape.rows * y->shape.cols);
    const int members = i->move.over == TT__OVER_DATA ? t->data : (int)tt__max(1, t->tensor);
    int64_t max = 0;
    for (int me = 0; me < members && tt__rules_of(i)->loads; me++)
        max = tt__max(max, tt__rules_of(i)->loads(&i->move, elements, me, members).done);
    return (double)max * (double)tt_dtype_bytes(x->shape.dtype);
}

/* The cost that limits the speed of an instruction. PRODUCT and ATTENTION: its FLOPs; RANKS: the bytes that a
   collective loads; UPDATE: the bytes of work that is done once a step, such as updates; ROWS: the bytes of
   all other kernels. */
typedef enum tt__cost {
    TT__COST_PRODUCT, TT__COST_ATTENTION, TT__COST_ROWS, TT__COST_UPDATE, TT__COST_RANKS, TT__COST_KINDS
} tt__cost;

static tt__cost tt__cost_of(const tt__instr *i)
{
    if (tt__rules_of(i)->phases) return TT__COST_RANKS;
    if (tt__is(i, TT__PRODUCT) || (tt__is(i, TT__LOSS) && tt__rules_of(i)->flops)) return TT__COST_PRODUCT;
    if (tt__rules_of(i)->flops) return TT__COST_ATTENTION;
    return tt__is(i, TT__RMW) || i->segment == TT__EACH_STEP ? TT__COST_UPDATE : TT__COST_ROWS;
}

/* Returns the FLOPs or bytes that limit instruction i (tt__cost_of), with all axes at their capacity. */
static double tt__work_of(const tt_tape *t, const tt__instr *i)
{
    tt__mat in[TT__MAX_IN];
    const tt__cost cost = tt__cost_of(i);
    if (cost == TT__COST_RANKS) return tt__loaded_bytes(t, i);
    if (cost != TT__COST_PRODUCT && cost != TT__COST_ATTENTION) return tt__touched_bytes(t, i);
    for (int j = 0; j < TT__MAX_IN; j++) in[j] = tt__at_capacity(t, i->in[j]);
    return tt__flops(i, in);
}

/* Returns whether instruction i computes in fp32: by the dtype of its left operand for a product or
   attention, by the dtype of its result for all other ops. */
static bool tt__is_single(const tt_tape *t, const tt__instr *i)
{
    const bool by_operand = tt__cost_of(i) <= TT__COST_ATTENTION || !i->out[0];
    return t->values[by_operand ? i->in[0] : i->out[0]].shape.dtype == TT_F32;
}

/* Returns the rate in c that limits work of kind `cost`, in FLOPs or bytes a second. single: the rate for
   fp32. */
static double *tt__rate_of(tt_costs *c, tt__cost cost, bool single)
{
    double *const rates[TT__COST_KINDS][2] = {
        {&c->product_16, &c->product_f32}, {&c->attention_16, &c->attention_f32}, {&c->rows_16, &c->rows_f32},
        {&c->update_16, &c->update_f32}, {&c->between_ranks, &c->between_ranks}};
    return rates[cost][single];
}

/* Returns the seconds that instruction i takes with all axes at their capacity. Computation takes the longer
   of two times, that of its arithmetic and that of its memory traffic. A transfer takes the time of its
   bytes. Each launch adds costs->launch. first: i is the first of the instructions that are launched
   together; the others add no launch. */
static double tt__seconds_of(const tt_tape *t, const tt__instr *i, const tt_costs *costs, bool first)
{
    const int stream = tt__stream_beside(t, i);
    tt_costs c = *costs;
    const double launch = first ? c.launch : 0, barrier = first ? c.barrier : 0;
    if (tt__is(i, TT__WAITS)) return 0;
    if (i->move.over == TT__OVER_STAGES && i->move.from != i->move.to)
        return tt__operand_bytes(t, i->out[0]) / c.between_ranks + barrier;
    if (stream == TT__RANKS_STREAM) return tt__work_of(t, i) / c.between_ranks + barrier;
    if (stream) return launch + tt__operand_bytes(t, i->in[0]) /
                                (stream == TT__OUT_STREAM ? c.to_host : c.from_host);
    if (i->on_host) return launch + tt__touched_bytes(t, i) / c.update_host;
    return launch + fmax(tt__work_of(t, i) / *tt__rate_of(&c, tt__cost_of(i), tt__is_single(t, i)),
                         tt__touched_bytes(t, i) / c.memory);
}

/* Estimated seconds of a program's instructions. */
typedef struct tt__spent {
    double compute, exposed;    /* compute: seconds of computation; exposed: seconds for which computation
                                   waits for transfers */
    double on_host;             /* part of `compute` that the host's processor computes */
    double busy[TT__STREAMS];   /* for each stream: seconds of its transfers */
} tt__spent;

/* step: seconds of a step with one micro-batch on each data rank. micro: seconds of each further
   micro-batch. */
typedef struct tt__replay { tt__spent step, micro; } tt__replay;

/* Returns the seconds of a step with `micros` micro-batches on each data rank. */
static tt__spent tt__spent_on(const tt__replay *r, int micros)
{
    tt__spent sum = r->step;
    const double more = micros - 1;
    sum.compute += more * r->micro.compute;
    sum.exposed += more * r->micro.exposed;
    sum.on_host += more * r->micro.on_host;
    for (int s = 0; s < TT__STREAMS; s++) sum.busy[s] += more * r->micro.busy[s];
    return sum;
}

static tt_status tt__replay_of(const tt_tape *t, const tt_costs *c, tt__replay *to)
{
    double *done = (double *)tt__calloc(t->ctx, sizeof *done * (size_t)t->n_values), idle[TT__STREAMS] = {0};
    /* seconds at which each stream has finished its work (idle) and each value is written (done) */
    double now = 0;
    tt__spent *all = &to->step;
    memset(to, 0, sizeof *to);
    if (!done) return TT_ERR_MEMORY;
    for (int k = 0; k < t->n_code; k++) {
        const tt__instr *i = &t->code[k];
        const double seconds = tt__seconds_of(t, i, c, k == 0 || !i[-1].with_next);
        const int link = tt__stream_beside(t, i);
        all->busy[link] += seconds;
        if (!link) all->compute += seconds;
        if (i->on_host) all->on_host += seconds;
        if (tt__is(i, TT__WAITS)) now = fmax(now, done[i->in[0]]);
        else if (i->stream) done[i->out[0]] = idle[i->stream] = fmax(now, idle[i->stream]) + seconds;
        else now += seconds;
        all->exposed = now - all->compute;
        if (i->segment <= TT__EACH_BACKWARD) to->micro = *all; /* the tape begins with the instructions of a
                                                                  micro-batch */
    }
    tt__free(t->ctx, done);
    return TT_OK;
}

/* The order of instructions, while the pass changes it. */
typedef struct tt__order {
    tt_tape *t;
    int n;              /* number of instructions, including WAITs */
    int *at, *place;    /* at: number of the instruction at each place; place: place of each instruction */
    double *begin;      /* for each instruction: seconds of computation before it */
    double *seconds;    /* for each instruction: seconds of computation that it takes */
    double *moves;      /* for each start: seconds for which its transfer occupies the stream */
    int *block;         /* for each instruction: number of blocks that end before it */
    bool *ends;         /* for each instruction: whether it is the last of a block */
    int *wait;          /* for each start: number of its WAIT; 0: not a start */
    /* For each instruction, the storages that it uses and those that it writes. Bit b stands for all storages
       whose numbers are b modulo 64, so disjoint bits mean disjoint storages. */
    uint64_t *uses, *writes;
    bool takes[TT__STREAMS]; /* for each stream: it has transfers that take results of computation away */
} tt__order;

/* Returns whether instruction a writes a storage that b uses. A WAIT writes the value that it waits for. */
static bool tt__writes_for(const tt_tape *t, const tt__instr *a, const tt__instr *b)
{
    const bool waits = tt__is(a, TT__WAITS);
    for (int j = 0; j < (waits ? 1 : TT__MAX_OUT); j++) {
        const int32_t v = waits ? a->in[0] : a->out[j], base = t->values[v].base;
        if (v && (tt__reads(t, b, base) || tt__writes(t, b, base))) return true;
    }
    return false;
}

static uint64_t tt__storage_bits(const tt_tape *t, const int32_t *ids, int n)
{
    uint64_t bits = 0;
    for (int j = 0; j < n; j++) if (ids[j]) bits |= (uint64_t)1 << (t->values[ids[j]].base & 63);
    return bits;
}

/* Returns whether instructions a and b must keep their order. */
static bool tt__is_ordered(const tt_tape *t, const tt__instr *a, const tt__instr *b)
{
    return tt__writes_for(t, a, b) || tt__writes_for(t, b, a);
}

/* Returns whether instruction b must stay after a. */
static bool tt__must_follow(const tt__order *o, int a, int b)
{
    const bool may = (o->writes[a] & o->uses[b]) || (o->writes[b] & o->uses[a]);
    return may && tt__is_ordered(o->t, &o->t->code[a], &o->t->code[b]);
}

/* Returns whether instruction i may move up together with a start that depends on it: other starts, WAITs and
   casts of shards may. */
static bool tt__may_rise(const tt__instr *i)
{
    return i->stream || tt__is(i, TT__WAITS) || (tt__is(i, TT__CASTS) && i->always && !i->with_next);
}

/* Moves instruction x to place `to`. */
static void tt__move_to(tt__order *o, int x, int to)
{
    const int from = o->place[x], step = to < from ? -1 : 1;
    for (int k = from; k != to; k += step) {
        o->at[k] = o->at[k + step];
        o->place[o->at[k]] = k;
    }
    o->at[to] = x;
    o->place[x] = to;
}

/* Returns whether place k is between updates in the host's memory that run together. A transfer moves past
   all these updates instead of stopping between them, and so runs beside them, because updates in the host's
   memory take long. */
static bool tt__amid_updates(const tt__order *o, int k)
{
    const tt__instr *i = &o->t->code[o->at[k - 1]];
    return i->on_host && i->with_next;
}

/* Moves instruction x up to where at most `until` seconds of computation come before it. x moves neither
   between instructions that run together nor before block number `first`. with_others: if x depends on an
   instruction that tt__may_rise allows, that instruction moves up, too. */
static void tt__rise(tt__order *o, int x, double until, int first, bool with_others)
{
    const tt__instr *code = o->t->code;
    int k = o->place[x], best = k;
    double begin = o->begin[x];
    while (k > 0 && (begin > until || tt__amid_updates(o, k))) {
        const int q = o->at[k - 1];
        if (code[q].segment != code[x].segment || o->block[q] < first) break;
        if (tt__must_follow(o, q, x)) {
            if (!with_others || !tt__may_rise(&code[q])) break;
            tt__rise(o, q, until, first, true);
            if (o->at[k - 1] == q) break;
            continue;
        }
        begin = o->begin[q];
        k--;
        if (k == 0 || !code[o->at[k - 1]].with_next) best = k;
    }
    if (best == o->place[x]) return;
    o->begin[x] = o->begin[o->at[best]];
    o->block[x] = o->block[o->at[best]];
    tt__move_to(o, x, best);
}

/* Moves WAIT x down to where `until` seconds of computation come before it, but not past the end of block
   number `last`. */
static void tt__sink(tt__order *o, int x, double until, int last)
{
    const tt__instr *code = o->t->code;
    int best = o->place[x];
    double begin = o->begin[x];
    for (int k = best + 1; k < o->n && (begin < until || tt__amid_updates(o, k)); k++) {
        const int q = o->at[k];
        if (code[q].segment != code[x].segment || tt__must_follow(o, x, q)) break;
        if (o->block[q] + o->ends[q] > last) break;
        begin = o->begin[q] + o->seconds[q];
        if (!code[q].with_next) best = k;
    }
    if (best == o->place[x]) return;
    const int above = o->at[best];
    o->begin[x] = o->begin[above] + o->seconds[above];
    o->block[x] = o->block[above] + o->ends[above];
    tt__move_to(o, x, best);
}

/* Returns whether transfer i brings a value that computation needs. Otherwise the transfer takes a result of
   computation away. */
static bool tt__brings(const tt_tape *t, const tt__instr *i)
{
    if (t->values[t->values[i->out[0]].base].host_copy) return true;
    if (t->values[t->values[i->in[0]].base].host_copy) return false;
    return i->stream == TT__IN_STREAM ||
           (i->stream == TT__RANKS_STREAM && !(tt__rules_of(i)->phases & TT__REDUCE_PHASE));
}

/* Moves start x up so that its transfer can end by the time that `due` seconds of computation are done. If
   x's stream also takes results away, x moves before any such transfer that would keep the stream busy too
   long. x moves at most `ahead` blocks above the block of its WAIT. */
static void tt__hoist(tt__order *o, int x, double due, int ahead)
{
    double until = due - o->moves[x];
    const bool shared = o->takes[o->t->code[x].stream];
    for (int k = o->place[x] - 1; k >= 0 && shared; k--) {
        const int q = o->at[k];
        const tt__instr *i = &o->t->code[q];
        if (i->stream != o->t->code[x].stream || tt__brings(o->t, i)) continue;
        if (o->begin[q] + o->moves[q] <= until || i->segment != o->t->code[x].segment) break;
        until = fmin(until, o->begin[q] * (1 - 1e-12)); /* just before instruction q begins */
    }
    tt__rise(o, x, until, o->block[o->wait[x]] - ahead, true);
}

/* Returns the last instruction that reads storage v. If that instruction copies v to the other memory, the
   last reader of the copy counts. */
static int tt__last_reader(const tt_tape *t, int32_t v)
{
    int last = t->values[v].reader;
    for (const tt__instr *i = &t->code[last]; tt__stream_beside(t, i) && !i->move.over; i = &t->code[last]) {
        v = t->values[i->out[0]].base;
        if (t->values[v].reader <= last) break;
        last = t->values[v].reader;
    }
    return last;
}

/* Marks the instructions that end a block. In the forward, an instruction ends a block if it writes a value
   marked by tt_block_end. In the backward, the last instruction that reads a marked value ends a block.
   Without marks, each product ends a block. At the end of a step, each group of instructions that run
   together is a block. */
static void tt__mark_blocks(tt__order *o, int n)
{
    tt_tape *t = o->t;
    bool marked = false;
    tt__index(t);
    for (int k = 0; k < n; k++) {
        const tt__instr *i = &t->code[k];
        for (int j = 0; j < TT__MAX_OUT; j++) o->ends[k] |= i->out[j] && t->values[i->out[j]].block_end;
        marked = marked || o->ends[k];
    }
    for (int32_t v = 1; v < t->n_values && marked; v++)
        if (t->values[v].block_end && t->values[v].base == v) o->ends[tt__last_reader(t, v)] = true;
    for (int k = 0; k < n; k++) {
        const tt__instr *i = &t->code[k];
        const bool alone = i->segment > TT__EACH_BACKWARD && !i->with_next && !tt__stream_beside(t, i);
        if (alone || (!marked && tt__is(i, TT__PRODUCT))) o->ends[k] = true;
    }
}

/* Splits transfer k into a start and a WAIT, if it can run on `stream`. Returns false if out of memory. */
static bool tt__part_start(tt__order *o, int k, int stream)
{
    tt_tape *t = o->t;
    const tt__instr *i = &t->code[k];
    const bool of_ranks = stream == TT__RANKS_STREAM, pair = i->move.from != i->move.to;
    const bool amid = i->move.over == TT__OVER_DATA && i->segment == TT__EACH_MICRO && !pair;
    const bool together = i->with_next || (k && i[-1].with_next);
    if (!stream || i->stream || together || (of_ranks && !amid)) return true;
    if (t->values[i->in[0]].base == t->values[i->out[0]].base) return true;
    t->code[k].stream = stream;
    tt__instr wait = t->code[k];
    wait.op = TT__OP_WAIT;
    wait.in[1] = wait.in[0];
    wait.in[0] = wait.out[0];
    wait.out[0] = 0;
    wait.add = wait.add_later = 0;
    wait.stream = TT__COMPUTE_STREAM;
    memset(&wait.move, 0, sizeof wait.move);
    memset(&wait.attr, 0, sizeof wait.attr);
    if (!TT__GROW(t->ctx, t->code, t->n_code, t->cap_code)) return tt__out_of_memory(t);
    o->wait[k] = t->n_code;
    t->code[t->n_code++] = wait;
    return true;
}

static bool tt__order_open(tt__order *o, tt_tape *t, const tt_costs *c, int n)
{
    const size_t max = 2 * (size_t)n + 1; /* each instruction may get a WAIT */
    memset(o, 0, sizeof *o);
    o->t = t;
    o->begin = (double *)tt__calloc(t->ctx, 3 * sizeof *o->begin * max);
    o->at = (int *)tt__calloc(t->ctx, 4 * sizeof *o->at * max);
    o->ends = (bool *)tt__calloc(t->ctx, sizeof *o->ends * max);
    o->uses = (uint64_t *)tt__alloc(t->ctx, 2 * sizeof *o->uses * max);
    if (!o->begin || !o->at || !o->ends || !o->uses) return false;
    o->writes = o->uses + max;
    o->seconds = o->begin + max;
    o->moves = o->seconds + max;
    o->place = o->at + max;
    o->block = o->place + max;
    o->wait = o->block + max;
    tt__mark_blocks(o, n);
    double now = 0;
    for (int k = 0, blocks = 0; k < n; k++) {
        const int stream = tt__stream_beside(t, &t->code[k]);
        const double seconds = tt__seconds_of(t, &t->code[k], c, k == 0 || !t->code[k - 1].with_next);
        if (!tt__part_start(o, k, stream)) return false;
        const int wait = o->wait[k];
        o->at[o->n++] = k;
        o->begin[k] = now;
        o->block[k] = blocks;
        if (wait) {
            o->moves[k] = seconds;
            o->at[o->n++] = wait;
            o->begin[wait] = now;
            o->block[wait] = blocks;
        } else if (!t->code[k].stream) {
            o->seconds[k] = seconds; /* computation, or a copy that stays on the computation stream */
        }
        now += o->seconds[k];
        blocks += o->ends[k];
    }
    for (int k = 0; k < o->n; k++) o->place[o->at[k]] = k;
    for (int k = 0; k < o->n; k++) {
        const tt__instr *i = &t->code[k];
        const bool waits = tt__is(i, TT__WAITS);
        o->writes[k] = tt__storage_bits(t, waits ? i->in : i->out, waits ? 1 : TT__MAX_OUT);
        o->uses[k] = tt__storage_bits(t, i->in, TT__MAX_IN) | tt__storage_bits(t, i->out, TT__MAX_OUT);
        if (o->wait[k] && !tt__brings(t, i)) o->takes[i->stream] = true;
    }
    return true;
}

static tt_status tt__reorder(tt__order *o)
{
    tt_tape *t = o->t;
    tt__instr *code = (tt__instr *)tt__alloc(t->ctx, sizeof *code * (size_t)(o->n + 1));
    if (!code) return TT_ERR_MEMORY;
    for (int k = 0; k < o->n; k++) code[k] = t->code[o->at[k]];
    tt__free(t->ctx, t->code);
    t->code = code;
    t->cap_code = o->n + 1;
    return TT_OK;
}

/* Adds a second value for each input that instructions read. The host copies the next run's data to the
   second value while this run is in flight. A run begins with a copy from the second value to the input
   (tt__take_arrivals), so that instructions, also recorded ones (CUDA graphs), find the input always at one
   address. */
static tt_status tt__pass_arrivals(tt_tape *t)
{
    const int32_t values = t->n_values;
    tt__index(t);
    for (int32_t v = 1; v < values; v++) {
        const tt__shape shape = t->values[v].shape;
        if (t->values[v].storage != TT__INPUT || t->values[v].base != v || t->values[v].uses == 0) continue;
        const int32_t id = tt__new_value(t, &shape, TT__INPUT, "next %.60s", t->values[v].name);
        if (!id) return TT_ERR_MEMORY;
        t->values[id].persistent = true;
        t->values[v].arrival = id;
    }
    return TT_OK;
}

/* Moves transfers so that they run beside computation. ahead: number of blocks by which a value may arrive
   before the block that needs it, and a result may stay in memory after the block that made it; 0: none. */
static tt_status tt__pass_overlap(tt_tape *t, const tt_costs *c, int ahead)
{
    const int n = t->n_code;
    tt__order o;
    double due[TT__STREAMS], idle[TT__STREAMS] = {0};
    if (ahead <= 0) return TT_OK;
    bool ok = tt__order_open(&o, t, c, n);
    /* First, the WAIT of a transfer that brings a value moves down to the first use of the value, and the
       start of any other transfer moves up to its operands. */
    for (int k = 0; k < n && ok; k++) {
        if (!o.wait[k]) continue;
        if (tt__brings(t, &t->code[k])) tt__sink(&o, o.wait[k], INFINITY, INT_MAX);
        else tt__rise(&o, k, -1, 0, false);
    }
    for (int s = 0; s < TT__STREAMS; s++) due[s] = INFINITY; /* for each stream: seconds by which its next
                                                                transfer must have started */
    for (int k = n - 1; k >= 0 && ok; k--) {
        double *next = &due[t->code[k].stream];
        if (!o.wait[k] || !tt__brings(t, &t->code[k])) continue;
        const double end = fmin(*next, o.begin[o.wait[k]]);
        const bool host_copy = t->values[t->values[t->code[k].out[0]].base].host_copy;
        tt__hoist(&o, k, end, ahead);
        /* The latest time for the start; o.begin[k] is earlier if the start has moved past updates that run
           together. */
        const double latest = end - o.moves[k];
        *next = fmin(*next, host_copy ? fmax(o.begin[k], latest) : o.begin[k]);
    }
    for (int at = 0; at < o.n && ok; at++) { /* visits the starts in the order in which they now are */
        const int k = o.at[at];
        if (!o.wait[k] || tt__brings(t, &t->code[k])) continue;
        double *end = &idle[t->code[k].stream];
        *end = fmax(*end, o.begin[k]) + o.moves[k];
        tt__sink(&o, o.wait[k], *end, o.block[o.wait[k]] + ahead);
    }
    tt_status status = ok ? tt__reorder(&o) : TT_ERR_MEMORY;
    tt__free(t->ctx, o.begin);
    tt__free(t->ctx, o.at);
    tt__free(t->ctx, o.ends);
    tt__free(t->ctx, o.uses);
    return status;
}
