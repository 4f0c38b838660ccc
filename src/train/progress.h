#pragma once
#include "../base/base.h"
#include "../ranks/processes.h"
#include "../files/lists.h"
#include "../files/json.h"
#include "features.h"
#include "trainer.h"

/* ----------------------------------------------------------------------------------------------- progress
   The data of a run of tt_fit, its progress line, and its file metrics.csv. */

/* Indices of the values of a tt__fit_point, which come from a line of metrics.csv. NaN: the line has no
   finite float there. */
typedef enum tt__fit_value { TT__FIT_LOSS, TT__FIT_METRIC, TT__FIT_LR, TT__FIT_VALUES } tt__fit_value;
typedef struct tt__fit_point {
    int64_t step, epoch;
    double value[TT__FIT_VALUES];
    bool validation;
} tt__fit_point;

typedef struct tt__fit_run {
    tt_trainer *r;
    const tt_source *train, *validation;
    int n_metrics, by;           /* n_metrics: number of the model's metrics; by: index of the metric that
                                    texts and the picture show */
    tt_metric metric;            /* metric number `by`; if its name is NULL, the model has no metric */
    double values[TT_METRICS];   /* the metrics of the last validation */
    const tt__feature_set *judged; /* features of the validation source */
    const char *unit;            /* name of the items that the model counts */
    bool best_by_metric;         /* whether the metric, not the loss, tells the best validation */
    tt_fit_options o;
    tt_progress p;
    int64_t steps, first_step;   /* steps: number of steps of an epoch; first_step: number of steps done
                                    before tt_fit began */
    double started, saved;       /* clock in seconds; started: start of tt_fit plus the time of validations;
                                    saved: the last save */
    double began;                /* clock in seconds at the start of the current step */
    struct { bool any; float lr; double items; int64_t reads; } last; /* the last step, if it is not counted
                                                                         yet (`any`) */
    double items, flops, peak;   /* items, flops: since tt_fit began; peak: the machine's peak FLOP/s */
    size_t bytes;                /* bytes of the arena */
    char state[TT__PATH], diverged[TT__PATH]; /* paths of the states, see tt__fit_save */
    bool has_state;              /* the folder holds a state of this run */
    bool state_is_sound;         /* the loss had not diverged when that state was saved */
    bool has_diverged;           /* the folder also holds a later state, whose loss has diverged */
    void *lock;                  /* the open and locked file `lock_path`, while tt_fit runs */
    char lock_path[TT__PATH];
    int in_row;                  /* number of steps that have been skipped since the parameters were last
                                    updated */
    int not_finite;              /* number of steps whose loss or gradient was not finite, since the last
                                    update of the parameters or the last validation, whichever came later */
    char why[TT__ERROR];         /* reason of the last skipped step */
    double margin, margin_targets; /* sums of margins and of pairs over the epoch, since tt_fit began */
    int64_t updated;             /* number of steps since tt_fit began that were not skipped */
    bool reported_skipped;           /* a skipped step was logged */
    bool reported_diverged;          /* a diverged loss was logged */
    bool stopped;                /* with several processes: a process was asked to stop */
    bool reported_short, reported_idle;  /* reported_short: an epoch with too few steps was logged;
                                            reported_idle: data ranks without micro-batches were logged */
    char *csv;                   /* text of metrics.csv so far */
    size_t csv_bytes, csv_room;
    tt__fit_point *point;        /* the `points` lines of metrics.csv */
    int points, cap_points;
} tt__fit_run;

tt_fit_options tt_fit_options_default(void)
{
    tt_fit_options o;
    memset(&o, 0, sizeof o);
    o.epochs = 1;
    o.save_seconds = 300;
    return o;
}

/* Prints the progress line of a step: a bar of `bar` columns (0: no bar), the first `fields` of 4 fields, and
   the time that is left. Returns the length of the whole line. */
static size_t tt__fit_columns(const tt_fit_event *e, int bar, int fields, char *to, size_t capacity)
{
    tt__text_buffer text = {to, capacity, 0};
    tt__print(&text, "epoch %lld/%lld ", (long long)e->epoch + 1, (long long)e->epochs);
    for (int k = 1; k <= bar; k++)
        tt__print(&text, "%s%c%s", k == 1 ? "[" : "", k * e->steps <= bar * e->step ? '#' : '.',
                  k == bar ? "] " : "");
    tt__print(&text, "%lld/%lld", (long long)e->step, (long long)e->steps);
    if (fields > 0) tt__print(&text, "  loss %.4f", e->loss);
    if (fields > 1 && e->metric_name) tt__print(&text, "  %s %.3f", e->metric_name, e->metric);
    if (fields > 1 && e->margins) tt__print(&text, "  margin %.3f", e->margin);
    if (fields > 2) tt__print(&text, "  %.0f %s/s", e->per_second, e->unit);
    if (fields > 3 && e->of_peak > 0) tt__print(&text, "  %.0f%% of peak", 100 * e->of_peak);
    const int left = (int)fmin(fmax(e->seconds_left, 0), 1e9);
    tt__print(&text, "  ETA %d:%02d", left / 60, left % 60);
    return text.length;
}

size_t tt_fit_text(const tt_fit_event *e, char *to, size_t capacity)
{
    enum { BAR = 20, LEAST = 5, FIELDS = 4 };
    tt__text_buffer text = {to, capacity, 0};
    if (e->validation) {
        tt__print(&text, "  validation: loss %.4f", e->validation->loss);
        if (e->metric_name && isnan(e->metric)) tt__print(&text, ", %s undefined", e->metric_name);
        else if (e->metric_name) tt__print(&text, ", %s %.4f", e->metric_name, e->metric);
        if (e->margins) tt__print(&text, ", margin %.4f", e->margin);
        tt__print(&text, "%s", e->best ? ", kept" : "");
        if (e->patience && e->worse)
            tt__print(&text, ", %lld of %lld in a row that are no better", (long long)e->worse,
                      (long long)e->patience);
        return text.length;
    }
    const size_t whole = tt__fit_columns(e, BAR, FIELDS, to, capacity);
    size_t length = whole;
    for (int bar = BAR - 1; length >= capacity && bar >= LEAST - 1; bar--)
        length = tt__fit_columns(e, bar < LEAST ? 0 : bar, FIELDS, to, capacity);
    for (int fields = FIELDS - 1; length >= capacity && fields >= 0; fields--)
        length = tt__fit_columns(e, 0, fields, to, capacity);
    return whole;
}

static bool tt__fit_stopped(const tt__fit_run *f)
{
    return f->r->ctx->net ? f->stopped : f->o.stop && *f->o.stop;
}

/* Returns the steps of all epochs so far, including skipped steps. */
static int64_t tt__fit_total(const tt__fit_run *f) { return f->p.epoch * f->steps + f->p.step; }

/* Returns whether all epochs are done or `patience` validations in a row were no better than the best. */
static bool tt__fit_is_over(const tt__fit_run *f)
{
    return f->p.epoch >= f->o.epochs || (f->o.patience && f->p.worse >= f->o.patience);
}

/* Makes all processes agree: all stop if a process was asked to stop, and all save if process 0 wants to
   save. */
static tt_status tt__fit_agree(tt__fit_run *f, tt_status status, bool *save)
{
    tt_context *ctx = f->r->ctx;
    const int32_t own[2] = {f->o.stop && *f->o.stop, *save};
    status = tt__agree(ctx, "tt_fit", status, own, sizeof own);
    for (int k = 0; k < tt_processes(ctx) && status == TT_OK; k++) {
        const int32_t *x = (const int32_t *)tt__noted(ctx, k, own);
        f->stopped = f->stopped || x[0];
        if (k == 0) *save = x[1] != 0;
    }
    return status;
}

/* Parses a line of metrics.csv of n characters. Returns false for the heading, which has no values. A field
   may be empty, because the line has no value of that metric; the value then becomes NaN. */
static bool tt__fit_read_line(const tt__fit_run *f, const char *line, size_t n, tt__fit_point *point)
{
    enum { FIRST = 4 }; /* the column of the first metric */
    char field[(int)FIRST + (int)TT_METRICS + 1][40];
    const char *end = line + n;
    for (int k = 0; k <= FIRST + f->n_metrics; k++) {
        const char *comma = (const char *)memchr(line, ',', (size_t)(end - line));
        const size_t length = comma ? (size_t)(comma - line) : sizeof field[k];
        if (length >= sizeof field[k]) return false;
        memcpy(field[k], line, length);
        field[k][length] = 0;
        line = comma + 1;
    }
    const char *const value[TT__FIT_VALUES] = {field[FIRST - 1], f->n_metrics ? field[FIRST + f->by] : "",
                                               field[FIRST + f->n_metrics]};
    point->step = strtoll(field[0], NULL, 10);
    point->epoch = strtoll(field[1], NULL, 10);
    point->validation = strcmp(field[2], "validation") == 0;
    for (int k = 0; k < TT__FIT_VALUES; k++) {
        const double x = tt__json_double(value[k], strlen(value[k]));
        const bool is = fabs(x) <= FLT_MAX && (value[k][0] || k == TT__FIT_LR);
        point->value[k] = is ? x : NAN;
    }
    return point->step >= 0 && point->epoch >= 1;
}

/* Adds a line to metrics.csv, and its values to the points of the picture. */
static tt_status tt__fit_line(tt__fit_run *f, const char *line, size_t n)
{
    tt_context *ctx = f->r->ctx;
    tt__fit_point point;
    if (f->csv_bytes + n + 1 > f->csv_room) {
        const size_t room = 2 * (f->csv_bytes + n) + 4096;
        char *more = (char *)tt__realloc(ctx, f->csv, room);
        if (!more) return TT_ERR_MEMORY;
        f->csv = more;
        f->csv_room = room;
    }
    memcpy(f->csv + f->csv_bytes, line, n);
    f->csv[f->csv_bytes += n] = 0;
    if (!tt__fit_read_line(f, line, n, &point)) return TT_OK;
    if (!TT__GROW(ctx, f->point, f->points, f->cap_points)) return TT_ERR_MEMORY;
    f->point[f->points++] = point;
    return TT_OK;
}

enum { TT__FIT_HEADING = 320 }; /* max bytes of the heading of metrics.csv */

static size_t tt__fit_heading(const tt__fit_run *f, char to[TT__FIT_HEADING])
{
    tt__text_buffer text = {to, TT__FIT_HEADING, 0};
    tt__print(&text, "step,epoch,split,loss,");
    for (int k = 0; k < f->n_metrics; k++) tt__print(&text, "%s,", f->r->model.metrics[k].name);
    tt__print(&text, "lr,grad_norm,loss_scale,skipped,bytes,seconds,%s_per_second\n", f->unit);
    return text.length;
}

static const char *tt__fit_number(double x, char to[32])
{
    if (fabs(x) <= FLT_MAX) return tt__shortest((float)x, to);
    return isnan(x) ? "nan" : x > 0 ? "inf" : "-inf";
}

/* Adds the line of a step or a validation to the metrics. lr: learning rate of the step. items: number of
   items in `seconds`. In the *s of a failed step, unknown values are NaN. */
static tt_status tt__fit_metrics(tt__fit_run *f, const tt_stats *s, bool validation, float lr, double items,
                                 double seconds)
{
    char line[512], number[7][32];
    tt__text_buffer text = {line, sizeof line, 0};
    tt__print(&text, "%lld,%lld,%s,%s,", (long long)s->step, (long long)f->p.epoch + 1,
              validation ? "validation" : "train", tt__fit_number(s->loss, number[0]));
    for (int k = 0; k < f->n_metrics; k++) {
        double (*of)(const tt_stats *) = f->r->model.metrics[k].of;
        const double x = validation ? f->values[k] : of ? of(s) : NAN;
        tt__print(&text, "%s,", validation || of ? tt__fit_number(x, number[1]) : "");
    }
    if (validation) tt__print(&text, ",,,,");
    else
        tt__print(&text, "%s,%s,%s,%lld,", tt__fit_number(lr, number[2]),
                  tt__fit_number(s->grad_norm, number[3]), tt__fit_number(s->loss_scale, number[4]),
                  (long long)s->skipped);
    tt__print(&text, "%zu,%s,%s\n", f->bytes, tt__fit_number(seconds, number[5]),
              tt__fit_number(seconds > 0 ? items / seconds : 0, number[6]));
    return tt__fit_line(f, line, text.length);
}

enum { TT__FIT_FIELDS = 32 }; /* max columns of metrics.csv */

/* Divides a line into its fields. Returns the number of fields; 0: there are more than TT__FIT_FIELDS. */
static int tt__fit_fields(const char *line, const char *field[TT__FIT_FIELDS], int length[TT__FIT_FIELDS])
{
    for (int k = 0; k < TT__FIT_FIELDS; k++) {
        field[k] = line;
        length[k] = (int)strcspn(line, ",\r\n");
        line += length[k];
        if (*line != ',') return k + 1;
        line++;
    }
    return 0;
}

/* The columns of a metrics.csv that an earlier version or a run with fewer metrics has written. */
typedef struct tt__fit_columns_of {
    int count, own;             /* count: number of columns of the file; own: number of columns of this run */
    int from[TT__FIT_FIELDS];   /* for each column of this run, the file's column; -1: the file lacks it */
    const char *missing;        /* a column that the file lacks */
    int missing_length;
} tt__fit_columns_of;

/* Finds this run's columns in the heading of a file. Returns whether the file has the first four columns, and
   no column that this run lacks. */
static bool tt__fit_match_columns(const char *heading, const char *of_file, tt__fit_columns_of *c)
{
    enum { NEEDED = 4 };
    const char *own[TT__FIT_FIELDS], *field[TT__FIT_FIELDS];
    int own_length[TT__FIT_FIELDS], length[TT__FIT_FIELDS], found = 0;
    memset(c, 0, sizeof *c);
    c->own = tt__fit_fields(heading, own, own_length);
    c->count = tt__fit_fields(of_file, field, length);
    for (int k = 0; k < c->own; k++) {
        c->from[k] = -1;
        for (int j = 0; j < c->count && c->from[k] < 0; j++)
            if (length[j] == own_length[k] && memcmp(field[j], own[k], (size_t)length[j]) == 0)
                c->from[k] = j;
        found += c->from[k] >= 0;
        if (c->from[k] >= 0) continue;
        if (k < NEEDED) return false;
        c->missing = own[k];
        c->missing_length = own_length[k];
    }
    return c->count && found == c->count;
}

/* Writes a line of the file with this run's columns; columns that the file lacks are empty. Returns the
   line's length; 0: the line has another number of fields than the file's heading. */
static size_t tt__fit_convert(const tt__fit_columns_of *c, const char *line, char *to, size_t capacity)
{
    const char *field[TT__FIT_FIELDS];
    int length[TT__FIT_FIELDS];
    tt__text_buffer text = {to, capacity, 0};
    if (tt__fit_fields(line, field, length) != c->count) return 0;
    for (int k = 0; k < c->own; k++) {
        const int j = c->from[k];
        tt__print(&text, "%.*s%s", j < 0 ? 0 : length[j], j < 0 ? "" : field[j],
                  k + 1 < c->own ? "," : "\n");
    }
    return text.length < capacity ? text.length : 0;
}

/* Reads the metrics of the run to resume, without the lines that are newer than the state: keeps all lines of
   completed epochs and, of the current epoch, those of the steps and validations that the state includes. */
static tt_status tt__fit_read_metrics(tt__fit_run *f)
{
    char path[TT__PATH];
    tt__file_bytes file;
    bool there = false;
    int64_t steps = 0;
    char heading[TT__FIT_HEADING];
    size_t length = tt__fit_heading(f, heading);
    tt__fit_point point;
    tt_status status = tt__path_join(f->r->ctx, path, f->o.folder, "metrics.csv");
    if (status == TT_OK) status = tt__folder_has(f->r->ctx, f->o.folder, "metrics.csv", &there);
    if (there) status = tt__file_open(f->r->ctx, path, &file);
    if (status != TT_OK || !there) return status;
    tt__fit_columns_of columns;
    const bool same = strncmp(file.bytes, heading, length) == 0;
    const bool match = same || tt__fit_match_columns(heading, file.bytes, &columns);
    if (match && !same)
        tt__log(f->r->ctx, TT_LOG_WARNING, "resume", "'%s' has no column '%.*s', which this run writes: "
                "the earlier lines have an empty field there", path, columns.missing_length, columns.missing);
    if (!match)
        status = tt__fail(f->r->ctx, TT_ERR_FORMAT, "'%s' has other columns than this run, which writes "
                          "%.*s: move the file away, and the run starts a new one", path, (int)length - 1,
                          heading);
    const char *line = file.bytes, *end;
    for (; status == TT_OK && (end = strchr(line, '\n')) != NULL; line = end + 1) {
        char converted[512];
        const char *text = same ? line : converted;
        const size_t n = same ? (size_t)(end + 1 - line)
                              : tt__fit_convert(&columns, line, converted, sizeof converted);
        if (!n || !tt__fit_read_line(f, text, n, &point)) continue;
        bool keeps = point.epoch <= f->p.epoch;
        if (point.epoch == f->p.epoch + 1) {
            if (!point.validation) keeps = steps++ < f->p.step;
            else keeps = steps <= f->p.step && f->p.epoch * f->steps + steps <= f->p.validated;
        }
        if (keeps) status = tt__fit_line(f, text, n);
    }
    tt__file_close(f->r->ctx, &file);
    return status;
}
