#pragma once
#include "../base/base.h"
#include "../files/lists.h"

/* --------------------------------------------------------------------------------------------------- metrics
   Metrics of predictions: F1 of classes, labels, tags and entities, correlations of scores,
   recall of pairs. */

static int64_t tt__prediction_count(const tt_predictions *p)
{
    return p->task == TT_TASK_LABELS ? p->rows * p->classes : p->rows;
}

/* Counts the predictions of each class. counts: (classes, 3): true positives, false positives and false
   negatives. */
static void tt__f1_counts(const tt_predictions *p, int64_t *counts)
{
    memset(counts, 0, sizeof *counts * 3 * (size_t)p->classes);
    for (int64_t k = 0, n = tt__prediction_count(p); k < n; k++) {
        if (p->task == TT_TASK_LABELS) {
            int64_t *c = counts + 3 * (k % p->classes);
            const bool is = p->values[k] > 0.5f, taken = p->outputs[k] > 0;
            if (is || taken) c[is && taken ? 0 : taken ? 1 : 2]++;
            continue;
        }
        const int32_t label = p->labels[k], taken = p->predicted[k];
        if (label < 0 || label >= p->classes) continue;
        counts[3 * taken + (taken != label)]++;
        if (taken != label) counts[3 * label + 2]++;
    }
}

/* Returns whether the task of the predictions has F1 of classes. */
static bool tt__has_f1(const tt_predictions *p)
{
    return p->task == TT_TASK_CLASS || p->task == TT_TASK_LABELS || p->task == TT_TASK_TAGS;
}

/* Returns F1 from the counts of right, wrong and missed predictions; `absent` if all are 0. */
static double tt__f1(const int64_t counts[3], double absent)
{
    const double right = 2 * (double)counts[0], all = right + (double)(counts[1] + counts[2]);
    return all > 0 ? right / all : absent;
}

/* Returns F1 of all classes together, and writes F1 of each class to f1 (classes), unless f1 is NULL. Returns
   and writes NaN if the task has no F1 of classes, or if memory runs out. */
static double tt__f1_of(const tt_predictions *p, double *f1)
{
    int64_t all[3] = {0, 0, 0};
    int64_t *counts = tt__has_f1(p) ? (int64_t *)tt__alloc(p->ctx, sizeof *counts * 3 * (size_t)p->classes)
                                    : NULL;
    for (int c = 0; c < p->classes && f1; c++) f1[c] = NAN;
    if (!counts) return NAN;
    tt__f1_counts(p, counts);
    for (int c = 0; c < p->classes; c++) {
        if (f1) f1[c] = tt__f1(counts + 3 * c, p->task == TT_TASK_LABELS ? 0 : NAN);
        for (int k = 0; k < 3; k++) all[k] += counts[3 * c + k];
    }
    tt__free(p->ctx, counts);
    return tt__f1(all, 0);
}

void tt_f1_scores(const tt_predictions *p, double *f1) { tt__f1_of(p, f1); }
static double tt__f1_micro_of(const tt_predictions *p) { return tt__f1_of(p, NULL); }

static double tt__f1_macro_of(const tt_predictions *p)
{
    double *f1 = (double *)tt__alloc(p->ctx, sizeof *f1 * (size_t)p->classes), sum = 0;
    int n = 0;
    if (!f1) return NAN;
    tt__f1_of(p, f1);
    for (int c = 0; c < p->classes; c++) if (!isnan(f1[c])) sum += f1[c], n++;
    tt__free(p->ctx, f1);
    return n ? sum / n : NAN;
}

/* -------------------------------------------------------------------------------------------------- entities
   The rules of seqeval's default mode (get_entities in seqeval 1.2.2), which are those of conlleval: an I-X
   that continues no entity of type X begins an entity. */

/* A tag as its prefix, 'B', 'I', 'E', 'S' or 'O' for outside, and the type of its entity. */
typedef struct tt__tag { char prefix; const char *type; } tt__tag;

static tt__tag tt__tag_of(const tt_predictions *p, int32_t tag)
{
    const char *name = tag >= 0 && tag < p->classes ? p->class_names[tag] : "O";
    const bool within = name[0] && strchr("BIES", name[0]) && name[1] == '-';
    const tt__tag t = {within ? name[0] : 'O', within ? name + 2 : ""};
    return t;
}

/* Returns whether an entity ends between two tags. */
static bool tt__entity_ends(tt__tag a, tt__tag b)
{
    if (a.prefix == 'O') return false;
    return a.prefix == 'E' || a.prefix == 'S' || b.prefix == 'B' || b.prefix == 'S' || b.prefix == 'O' ||
           strcmp(a.type, b.type) != 0;
}

/* Returns whether an entity begins at tag b, which follows tag a. */
static bool tt__entity_begins(tt__tag a, tt__tag b)
{
    if (b.prefix == 'O') return false;
    return b.prefix == 'B' || b.prefix == 'S' || a.prefix == 'O' || a.prefix == 'E' || a.prefix == 'S' ||
           strcmp(a.type, b.type) != 0;
}

static double tt__f1_entities_of(const tt_predictions *p)
{
    const tt__tag outside = {'O', ""};
    int64_t counts[3] = {0, 0, 0}, begin[2] = {0, 0};
    bool any = false;
    for (int c = 0; c < p->classes && p->class_names; c++) any = any || tt__tag_of(p, c).prefix != 'O';
    if (!any || p->task != TT_TASK_TAGS) return NAN;
    for (int64_t s = 0; s < p->seqs; s++) {
        tt__tag last[2] = {outside, outside};
        for (int64_t row = p->seq_start[s]; row <= p->seq_start[s + 1]; row++) {
            const bool end = row == p->seq_start[s + 1];
            if (!end && (p->labels[row] < 0 || p->labels[row] >= p->classes)) continue;
            const tt__tag now[2] = {end ? outside : tt__tag_of(p, p->labels[row]),
                                    end ? outside : tt__tag_of(p, p->predicted[row])};
            const bool ends[2] = {tt__entity_ends(last[0], now[0]), tt__entity_ends(last[1], now[1])};
            const bool right = ends[0] && ends[1] && begin[0] == begin[1] &&
                               strcmp(last[0].type, last[1].type) == 0;
            if (right) counts[0]++;
            else counts[1] += ends[1], counts[2] += ends[0];
            for (int k = 0; k < 2; k++) {
                if (tt__entity_begins(last[k], now[k])) begin[k] = row;
                last[k] = now[k];
            }
        }
    }
    return tt__f1(counts, 0);
}

/* ------------------------------------------------------------------------------------------- correlations */

typedef struct tt__ranked { double value; int64_t row; } tt__ranked;

static int tt__by_value(const void *x, const void *y)
{
    const tt__ranked *a = (const tt__ranked *)x, *b = (const tt__ranked *)y;
    return (a->value > b->value) - (a->value < b->value);
}

/* Replaces n numbers by their ranks, from 1. Equal numbers get the mean of their ranks. */
static void tt__mean_ranks(double *x, int64_t n, tt__ranked *sorted)
{
    for (int64_t k = 0; k < n; k++) sorted[k].value = x[k], sorted[k].row = k;
    qsort(sorted, (size_t)n, sizeof *sorted, tt__by_value);
    for (int64_t k = 0, end; k < n; k = end) {
        for (end = k + 1; end < n && sorted[end].value == sorted[k].value;) end++;
        for (int64_t j = k; j < end; j++) x[sorted[j].row] = 0.5 * (double)(k + end + 1);
    }
}

/* Returns Pearson's correlation of n pairs of numbers; NaN if one side is constant or not finite. */
static double tt__correlation(const double *x, const double *y, int64_t n)
{
    double mean[2] = {0, 0}, xx = 0, yy = 0, xy = 0;
    for (int64_t k = 0; k < n; k++) mean[0] += x[k], mean[1] += y[k];
    mean[0] /= (double)n;
    mean[1] /= (double)n;
    for (int64_t k = 0; k < n; k++) {
        const double a = x[k] - mean[0], b = y[k] - mean[1];
        xx += a * a;
        yy += b * b;
        xy += a * b;
    }
    return xx > 0 && yy > 0 ? fmin(fmax(xy / (sqrt(xx) * sqrt(yy)), -1), 1) : NAN;
}

/* Returns the cosine of two rows of n numbers. */
static double tt__cosine(const float *a, const float *b, int n)
{
    double aa = 0, bb = 0, ab = 0;
    for (int k = 0; k < n; k++) {
        aa += (double)a[k] * a[k];
        bb += (double)b[k] * b[k];
        ab += (double)a[k] * b[k];
    }
    return ab / sqrt(aa * bb);
}

/* Sets x to the labels and y to the predictions of score c or, of TT_TASK_EMBED, to the scores of the pairs
   and the cosines of their embeddings. Returns the number of labels. */
static int64_t tt__two_sides(const tt_predictions *p, int c, double *x, double *y)
{
    int64_t n = 0, pair = 0;
    for (int64_t k = 0; k < p->rows; k++) {
        const int64_t at = k * p->classes;
        if (p->task != TT_TASK_EMBED) {
            x[n] = p->values[at + c];
            y[n++] = p->outputs[at + c];
            continue;
        }
        if (p->labels[k] != 0) continue;
        while (pair < p->rows && p->labels[pair] != 1) pair++; /* text n of the source has pair n */
        if (pair == p->rows) return 0;
        x[n] = p->values[k];
        y[n++] = tt__cosine(p->outputs + at, p->outputs + p->classes * pair++, p->classes);
    }
    return n;
}

static double tt__correlations(const tt_predictions *p, bool ranks)
{
    const size_t rows = (size_t)p->rows;
    const bool embeds = p->task == TT_TASK_EMBED;
    const int scores = embeds ? 1 : p->classes;
    if ((p->task != TT_TASK_SCORES && !embeds) || !p->values || !rows) return NAN;
    double sum = 0, *x = (double *)tt__alloc(p->ctx, sizeof *x * 2 * rows), *y = x ? x + rows : NULL;
    tt__ranked *sorted = ranks ? (tt__ranked *)tt__alloc(p->ctx, sizeof *sorted * rows) : NULL;
    for (int c = 0; c < scores && x && (sorted || !ranks); c++) {
        const int64_t n = tt__two_sides(p, c, x, y);
        bool finite = n > 0;
        for (int64_t k = 0; k < n; k++) finite = finite && isfinite(x[k]) && isfinite(y[k]);
        if (ranks && finite) tt__mean_ranks(x, n, sorted), tt__mean_ranks(y, n, sorted);
        sum += finite ? tt__correlation(x, y, n) : NAN;
    }
    const bool done = x && (sorted || !ranks);
    tt__free(p->ctx, sorted);
    tt__free(p->ctx, x);
    return done ? sum / scores : NAN;
}

static double tt__pearson_of(const tt_predictions *p) { return tt__correlations(p, false); }
static double tt__spearman_of(const tt_predictions *p) { return tt__correlations(p, true); }

static tt_metric tt__prediction_metric(const char *name, double (*of)(const tt_predictions *p))
{
    const tt_metric m = {name, NULL, false, of};
    return m;
}

tt_metric tt_f1_macro(void) { return tt__prediction_metric("f1_macro", tt__f1_macro_of); }
tt_metric tt_f1_micro(void) { return tt__prediction_metric("f1_micro", tt__f1_micro_of); }
tt_metric tt_f1_entities(void) { return tt__prediction_metric("f1_entities", tt__f1_entities_of); }
tt_metric tt_pearson(void) { return tt__prediction_metric("pearson", tt__pearson_of); }
tt_metric tt_spearman(void) { return tt__prediction_metric("spearman", tt__spearman_of); }

/* ---------------------------------------------------------------------------------------------------- recall
   The share of texts whose pair is among the nearest of all pairs and negatives. */

/* The data of a recall. The pair of a text is the other text of its example. unit: (rows, width) the
   embeddings, each divided by its length. anchors: (n) the row in `unit` of each text. candidates: (all) the
   row of the pair of each of the n texts, then the rows of the negatives. hits: (n) 1 if the pair of a text
   is among the `nearest` candidates of the text. */
typedef struct tt__recall {
    float *unit;
    int64_t *anchors, *candidates;
    int64_t n, all, width, nearest;
    char *hits;
} tt__recall;

/* Returns the inner product of two rows. */
static float tt__inner(const float *x, const float *y, int64_t n)
{
    float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0}; /* several sums, so that a compiler can use vector
                                                instructions */
    int64_t k = 0;
    for (; k + 8 <= n; k += 8)
        for (int j = 0; j < 8; j++) sum[j] += x[k + j] * y[k + j];
    for (; k < n; k++) sum[0] += x[k] * y[k];
    return ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
}

/* Sets hits[task]. If candidates are as near as the pair, the pair counts at the mean of their ranks, so that
   equal embeddings of many texts are no hits. */
static void tt__recall_task(void *arg, int64_t task, int thread)
{
    const tt__recall *r = (const tt__recall *)arg;
    const float *x = r->unit + r->anchors[task] * r->width;
    const float own = tt__inner(x, r->unit + r->candidates[task] * r->width, r->width);
    int64_t nearer = 0, equal = 0;
    (void)thread;
    for (int64_t c = 0; c < r->all; c++) {
        if (c == task) continue;
        const float other = tt__inner(x, r->unit + r->candidates[c] * r->width, r->width);
        nearer += other > own;
        equal += other == own;
    }
    r->hits[task] = isfinite(own) && (double)nearer + 0.5 * (double)equal < (double)r->nearest;
}

/* Returns the recall among the `nearest` candidates. Returns NaN without pairs, and when out of memory. */
static double tt__recall_of(const tt_predictions *p, int nearest)
{
    const size_t rows = (size_t)p->rows, width = (size_t)p->classes;
    tt__recall r = {NULL, NULL, NULL, 0, 0, p->classes, nearest, NULL};
    double hits = NAN;
    if (p->task != TT_TASK_EMBED || !rows || (p->values && !isnan(p->values[0]))) return NAN;
    r.unit = (float *)tt__alloc(p->ctx, sizeof *r.unit * rows * width);
    r.anchors = (int64_t *)tt__alloc(p->ctx, sizeof *r.anchors * rows);
    r.candidates = (int64_t *)tt__alloc(p->ctx, sizeof *r.candidates * rows);
    r.hits = (char *)tt__alloc(p->ctx, rows);
    if (r.unit && r.anchors && r.candidates && r.hits) {
        for (int64_t k = 0; k < p->rows; k++) if (p->labels[k] == 0) r.anchors[r.n++] = k;
        for (int role = 1; role < 3; role++)
            for (int64_t k = 0; k < p->rows; k++) if (p->labels[k] == role) r.candidates[r.all++] = k;
        for (size_t k = 0; k < rows; k++) {
            const float *from = p->outputs + k * width;
            const float length = sqrtf(tt__inner(from, from, r.width));
            for (size_t c = 0; c < width; c++) r.unit[k * width + c] = from[c] / length;
        }
        if (r.n && r.all >= r.n) {
            tt__run_tasks(p->ctx->cpu.pool, r.n, tt__recall_task, &r);
            hits = 0;
            for (int64_t k = 0; k < r.n; k++) hits += r.hits[k];
        }
    }
    void *const owned[] = {r.unit, r.anchors, r.candidates, r.hits};
    tt__free_all(p->ctx, owned, TT__COUNT(owned));
    return hits / (double)r.n;
}

static double tt__recall_at_1_of(const tt_predictions *p) { return tt__recall_of(p, 1); }
static double tt__recall_at_10_of(const tt_predictions *p) { return tt__recall_of(p, 10); }
tt_metric tt_recall_at_1(void) { return tt__prediction_metric("recall_at_1", tt__recall_at_1_of); }
tt_metric tt_recall_at_10(void) { return tt__prediction_metric("recall_at_10", tt__recall_at_10_of); }
