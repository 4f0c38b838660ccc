/* A tape built by hand whose copies to the host's memory and back run on separate streams. Included after
   tinytrain.h and test.h. */
#ifndef TINYTRAIN_TEST_STREAMS_H
#define TINYTRAIN_TEST_STREAMS_H

enum { STREAM_BLOCKS = 5, STREAM_ROWS = 40, STREAM_COLS = 12, STREAM_NUMBERS = STREAM_ROWS * STREAM_COLS };

typedef struct streams {
    tt_tape *t;
    tt_value x, y;
    tt_program *p;
    int wait[2 * STREAM_BLOCKS]; /* numbers of the WAIT instructions, in order */
} streams;

/* Starts a copy of `from` to a new value in a memory space, and returns the new value. */
static inline int32_t streams_start(tt_tape *t, int32_t from, tt__space space)
{
    const tt__shape shape = t->values[from].shape;
    const int32_t to = tt__new_value(t, &shape, TT__TRANSIENT, "%s %d", space == TT__HOST ? "away" : "back",
                                     from);
    tt__instr *i = tt__append(t, TT__OP_COPY);
    t->values[to].space = space;
    i->stream = space == TT__HOST ? TT__OUT_STREAM : TT__IN_STREAM;
    i->in[0] = from;
    i->out[0] = to;
    return to;
}

static inline void streams_wait(tt_tape *t, int32_t to, int32_t from)
{
    tt__instr *i = tt__append(t, TT__OP_WAIT);
    i->in[0] = to;
    i->in[1] = from;
}

/* Compiles `h[0] = gelu(x)` and, for k from 0 to STREAM_BLOCKS - 1, `h[k + 1] = gelu(h[k])`. Then `y` begins
   as the last h, and for k from STREAM_BLOCKS - 1 down to 0, `y = gelu(y) + h[k]`. Each h[k] that is added is
   copied to the host's memory while h[k + 1] is computed. The copy back begins one iteration before the
   iteration that adds h[k]. */
static inline bool streams_compile(streams *s, tt_context *ctx, const char *device)
{
    int32_t h[STREAM_BLOCKS + 1], away[STREAM_BLOCKS], back[STREAM_BLOCKS];
    tt_compile_options o = tt_compile_options_default();
    memset(s, 0, sizeof *s);
    tt_tape *t = s->t = tt_tape_new(ctx);
    s->x = tt_input(t, "x", TT_F32, STREAM_ROWS, STREAM_COLS);
    h[0] = tt_gelu(t, s->x).id;
    for (int k = 0; k < STREAM_BLOCKS; k++) {
        away[k] = streams_start(t, h[k], TT__HOST);
        h[k + 1] = tt_gelu(t, tt__handle(t, h[k])).id;
        streams_wait(t, away[k], h[k]);
    }
    s->y = tt__handle(t, h[STREAM_BLOCKS]);
    back[STREAM_BLOCKS - 1] = streams_start(t, away[STREAM_BLOCKS - 1], TT__DEVICE);
    for (int k = STREAM_BLOCKS - 1; k >= 0; k--) {
        if (k) back[k - 1] = streams_start(t, away[k - 1], TT__DEVICE);
        s->y = tt_gelu(t, s->y);
        streams_wait(t, back[k], away[k]);
        s->y = tt_add(t, s->y, tt__handle(t, back[k]));
    }
    o.train = false;
    o.device = device;
    if (tt_tape_status(t) != TT_OK || !(s->p = tt_compile(t, s->y, &o))) return false;
    for (int k = 0, n = 0; k < s->p->built.t->n_code; k++)
        if (s->p->built.t->code[k].op == TT__OP_WAIT) s->wait[n++] = k;
    return s->wait[2 * STREAM_BLOCKS - 1] > 0 && s->p->built.in_flight == 2;
}

/* Makes WAIT number `wait` wait for nothing, by removing its operand: the verifier would refuse this tape,
   but does not see the tape. Makes room for the copy that then stays in flight. Returns false when out of
   memory. */
static inline bool streams_drop(streams *s, int wait)
{
    tt__rank *r = &s->p->rank[0];
    s->p->built.t->code[s->wait[wait]].in[0] = 0;
    s->p->built.in_flight++;
    tt__free(s->p->ctx, r->started);
    r->started = (tt__started *)tt__calloc(s->p->ctx, sizeof *r->started * (size_t)s->p->built.in_flight);
    return r->started != NULL;
}

enum { STREAM_RUNS = 4 }; /* runs after the first use a CUDA graph, on devices that have them */

static inline tt_status streams_run(streams *s, float to[STREAM_RUNS][STREAM_NUMBERS])
{
    tt_status status = TT_OK;
    float x[STREAM_NUMBERS];
    for (int run = 0; run < STREAM_RUNS && status == TT_OK; run++) {
        for (int k = 0; k < STREAM_NUMBERS; k++) x[k] = (float)((k * 37 + run * 11) % 101) / 25 - 2;
        status = tt_set(s->p, s->x, x, STREAM_ROWS);
        if (status == TT_OK) status = tt_run(s->p, NULL);
        if (status == TT_OK) status = tt_get(s->p, s->y, to[run], STREAM_NUMBERS);
    }
    return status;
}

static inline void streams_free(streams *s)
{
    tt_program_free(s->p);
    tt_tape_free(s->t);
}

#endif
