#pragma once
#include "../base/base.h"
#include "../base/random.h"
#include "../tape/tape.h"
#include "params.h"

/* ------------------------------------------------------------------------------------------------- low rank
   Replaces the weight of a linear layer by two factors, from the singular value decomposition of the weight.
   The decomposition is one-sided Jacobi in double precision on the triangular factor of the weight (Hestenes,
   "Inversion of matrices by biorthogonalization and related results", 1958; Drmac and Veselic, "New fast and
   accurate Jacobi SVD algorithm", 2008). A randomised decomposition computes the leading singular values of a
   large weight (Halko, Martinsson and Tropp, "Finding structure with randomness: Probabilistic
   algorithms for constructing approximate matrix decompositions", 2011, algorithms 4.4 and 5.1). The results
   have the same bits for any number of threads. */

static double tt__dot(const double *a, const double *b, int64_t n)
{
    double s[4] = {0, 0, 0, 0};
    int64_t k = 0;
    for (; k + 4 <= n; k += 4)
        for (int j = 0; j < 4; j++) s[j] += a[k + j] * b[k + j];
    for (; k < n; k++) s[0] += a[k] * b[k];
    return (s[0] + s[1]) + (s[2] + s[3]);
}

/* A decomposition in progress. */
typedef struct tt__svd_work {
    double *x;       /* (n, m) columns of the matrix, one after another */
    double *g;       /* (n, n) rows of the triangular factor, which the rotations make orthogonal */
    double *norm;    /* (n) squares of the lengths of the rows of g */
    bool *rotated;   /* (n / 2 + 1) whether the pair was rotated in this sweep */
    int64_t m, n;
    int64_t step;    /* of the triangular factor: the column; of a sweep: the round */
    double *to;      /* columns of length m to which tt__svd_reflect applies a reflector */
    int64_t first;   /* the first of these columns */
} tt__svd_work;

/* Applies the reflector in column w->step of w->x to column `w->first + task` of w->to. */
static void tt__svd_reflect(void *arg, int64_t task, int thread)
{
    tt__svd_work *w = (tt__svd_work *)arg;
    const int64_t k = w->step, m = w->m - k;
    const double *v = w->x + k * w->m + k;
    double *to = w->to + (w->first + task) * w->m + k;
    const double factor = 2 * tt__dot(v, to, m);
    (void)thread;
    for (int64_t i = 0; i < m; i++) to[i] -= factor * v[i];
}

/* Computes the rows of the triangular factor of w->x by Householder's reflections, which overwrite w->x. */
static void tt__svd_triangle(tt__svd_work *w, tt__pool *pool)
{
    const int64_t m = w->m, n = w->n;
    w->to = w->x;
    for (int64_t k = 0; k < n; k++) {
        double *v = w->x + k * m + k;
        const double length = sqrt(tt__dot(v, v, m - k)), sign = v[0] < 0 ? -1 : 1;
        for (int64_t j = 0; j < k; j++) w->g[j * n + k] = w->x[k * m + j];
        w->g[k * n + k] = -sign * length;
        v[0] += sign * length;
        const double norm = sqrt(tt__dot(v, v, m - k));
        for (int64_t i = 0; i < m - k; i++) v[i] = norm > 0 ? v[i] / norm : 0;
        w->step = k;
        w->first = k + 1;
        tt__run_tasks(pool, n - k - 1, tt__svd_reflect, w);
    }
}

/* Replaces the columns of w->x by an orthonormal basis of what they span: the product of the reflectors of
   tt__svd_triangle. q: scratch memory for as many columns. */
static void tt__svd_basis(tt__svd_work *w, tt__pool *pool, double *q)
{
    const size_t bytes = sizeof *q * (size_t)(w->m * w->n);
    tt__svd_triangle(w, pool);
    memset(q, 0, bytes);
    w->to = q;
    for (int64_t k = w->n - 1; k >= 0; k--) {
        q[k * w->m + k] = 1;
        w->step = w->first = k;
        tt__run_tasks(pool, w->n - k, tt__svd_reflect, w);
    }
    memcpy(w->x, q, bytes);
}

/* Makes the rows of pair `task` of a round orthogonal. In a round each row is in one pair, and n - 1 rounds
   have all pairs: row 0 stays, and the other rows move on by one place. */
static void tt__svd_rotate(void *arg, int64_t task, int thread)
{
    tt__svd_work *w = (tt__svd_work *)arg;
    const int64_t n = w->n, even = n + n % 2, others = even - 1;
    const int64_t p = task ? 1 + (task - 1 + w->step) % others : 0;
    const int64_t q = 1 + (even - 2 - task + w->step) % others;
    (void)thread;
    if (p >= n || q >= n) return; /* the pair of a row that an odd n lacks */
    double *a = w->g + p * n, *b = w->g + q * n;
    const double c = tt__dot(a, b, n), limit = sqrt((double)n) * 1e-16 * sqrt(w->norm[p]) * sqrt(w->norm[q]);
    if (!(fabs(c) > limit)) return;
    const double zeta = (w->norm[q] - w->norm[p]) / (2 * c);
    const double t = (zeta < 0 ? -1 : 1) / (fabs(zeta) + sqrt(1 + zeta * zeta)), cosine = 1 / sqrt(1 + t * t);
    const double sine = cosine * t;
    for (int64_t k = 0; k < n; k++) {
        const double old = a[k];
        a[k] = cosine * old - sine * b[k];
        b[k] = sine * old + cosine * b[k];
    }
    w->norm[p] = tt__dot(a, a, n);
    w->norm[q] = tt__dot(b, b, n);
    w->rotated[task] = true;
}

/* Computes singular values of a matrix (m, n), m >= n, in descending order, and its right singular vectors,
   in the rows of v (n, n). x: (n, m) the columns of the matrix, which are overwritten. sigma: (n). */
static tt_status tt__svd(tt_context *ctx, double *x, int64_t m, int64_t n, double *sigma, double *v)
{
    enum { MAX_SWEEPS = 60 };
    const size_t side = (size_t)n, pairs = side / 2 + 1;
    double *g = (double *)tt__calloc(ctx, sizeof *g * side * side);
    double *norm = (double *)tt__alloc(ctx, sizeof *norm * side);
    bool *rotated = (bool *)tt__alloc(ctx, sizeof *rotated * pairs), more = true;
    int64_t *order = (int64_t *)tt__alloc(ctx, sizeof *order * side);
    tt__svd_work w = {x, g, norm, rotated, m, n, 0, NULL, 0};
    tt_status status = g && norm && rotated && order ? TT_OK : TT_ERR_MEMORY;
    if (status == TT_OK) tt__svd_triangle(&w, ctx->cpu.pool);
    for (int64_t k = 0; k < n && status == TT_OK; k++) norm[k] = tt__dot(g + k * n, g + k * n, n);
    for (int sweep = 0; sweep < MAX_SWEEPS && more && status == TT_OK; sweep++) {
        memset(rotated, 0, sizeof *rotated * pairs);
        for (w.step = 0; w.step < n + n % 2 - 1; w.step++)
            tt__run_tasks(ctx->cpu.pool, (n + 1) / 2, tt__svd_rotate, &w);
        more = false;
        for (int64_t k = 0; k < (int64_t)pairs; k++) more = more || rotated[k];
    }
    for (int64_t k = 0; k < n && status == TT_OK; k++) { /* sorts by insertion */
        int64_t at = k;
        for (; at > 0 && norm[order[at - 1]] < norm[k]; at--) order[at] = order[at - 1];
        order[at] = k;
    }
    for (int64_t k = 0; k < n && status == TT_OK; k++) {
        const double *row = g + order[k] * n;
        sigma[k] = sqrt(norm[order[k]]);
        for (int64_t i = 0; i < n; i++) v[k * n + i] = sigma[k] > 0 ? row[i] / sigma[k] : 0;
    }
    tt__free(ctx, g);
    tt__free(ctx, norm);
    tt__free(ctx, rotated);
    tt__free(ctx, order);
    return status;
}

enum {
    TT__SVD_WHOLE = 512, /* weights whose smaller side is at most this long have all their singular values
                            computed */
    TT__SVD_MORE = 10,   /* vectors of a randomised decomposition beside those that are wanted */
    TT__SVD_POWERS = 4,  /* its power iterations */
    TT__SVD_ROWS = 512, TT__SVD_COLS = 8 /* rows, and columns, of a task of its products */
};

/* A matrix x (n, m), which has columns one after another, and vectors of both sides: y (l, m), z (l, n). */
typedef struct tt__svd_range { const double *x; double *y, *z; int64_t m, n, l; } tt__svd_range;

/* Computes some rows of the columns of y, which are the matrix times the columns of z. */
static void tt__svd_times(void *arg, int64_t task, int thread)
{
    const tt__svd_range *r = (const tt__svd_range *)arg;
    const int64_t first = task * TT__SVD_ROWS, rows = tt__min(TT__SVD_ROWS, r->m - first);
    (void)thread;
    for (int64_t k = 0; k < r->l; k++) memset(r->y + k * r->m + first, 0, sizeof *r->y * (size_t)rows);
    for (int64_t j = 0; j < r->n; j++)
        for (int64_t k = 0; k < r->l; k++) {
            const double factor = r->z[k * r->n + j], *of = r->x + j * r->m + first;
            double *to = r->y + k * r->m + first;
            for (int64_t i = 0; i < rows; i++) to[i] += factor * of[i];
        }
}

/* Computes some rows of the columns of z, which are the transposed matrix times the columns of y. */
static void tt__svd_back(void *arg, int64_t task, int thread)
{
    const tt__svd_range *r = (const tt__svd_range *)arg;
    const int64_t first = task * TT__SVD_COLS, end = tt__min(first + TT__SVD_COLS, r->n);
    (void)thread;
    for (int64_t k = 0; k < r->l; k++)
        for (int64_t j = first; j < end; j++)
            r->z[k * r->n + j] = tt__dot(r->x + j * r->m, r->y + k * r->m, r->m);
}

/* Computes l approximate singular values of a matrix (m, n), m >= n >= l, in descending order, and right
   singular vectors, in the rows of v (l, n), which are orthonormal: the length of the matrix times vector k
   is sigma[k]. x: (n, m) the columns of the matrix. sigma: (l). */
static tt_status tt__svd_leading(tt_context *ctx, const double *x, int64_t m, int64_t n, int64_t l,
                                 double *sigma, double *v)
{
    const size_t side = (size_t)(l * l), large = (size_t)(l * m);
    const int64_t rows = tt__ceil_div(m, TT__SVD_ROWS), cols = tt__ceil_div(n, TT__SVD_COLS);
    double *y = (double *)tt__alloc(ctx, sizeof *y * large);
    double *q = (double *)tt__alloc(ctx, sizeof *q * large);
    double *g = (double *)tt__alloc(ctx, sizeof *g * side);
    double *turn = (double *)tt__alloc(ctx, sizeof *turn * side);
    tt_status status = y && q && g && turn ? TT_OK : TT_ERR_MEMORY;
    tt__svd_range r = {x, y, v, m, n, l};
    tt__svd_work of_m = {y, g, NULL, NULL, m, l, 0, NULL, 0}, of_n = {v, g, NULL, NULL, n, l, 0, NULL, 0};
    for (int64_t k = 0; k < l * m && status == TT_OK; k += 4) {
        float some[4];
        tt__normal4(1, (uint64_t)(k / 4), some); /* key 1: one matrix has one decomposition */
        for (int64_t i = 0; i < tt__min(4, l * m - k); i++) y[k + i] = some[i];
    }
    for (int k = 0; k <= TT__SVD_POWERS && status == TT_OK; k++) {
        if (k) tt__svd_basis(&of_m, ctx->cpu.pool, q);
        tt__run_tasks(ctx->cpu.pool, cols, tt__svd_back, &r);
        tt__svd_basis(&of_n, ctx->cpu.pool, q);
        tt__run_tasks(ctx->cpu.pool, rows, tt__svd_times, &r);
    }
    if (status == TT_OK) status = tt__svd(ctx, y, m, l, sigma, turn);
    for (int64_t k = 0; k < l && status == TT_OK; k++) {
        double *to = q + k * n;
        memset(to, 0, sizeof *to * (size_t)n);
        for (int64_t j = 0; j < l; j++)
            for (int64_t i = 0; i < n; i++) to[i] += turn[k * l + j] * v[j * n + i];
    }
    if (status == TT_OK) memcpy(v, q, sizeof *v * (size_t)(l * n));
    tt__free(ctx, y);
    tt__free(ctx, q);
    tt__free(ctx, g);
    tt__free(ctx, turn);
    return status;
}

/* Returns the smallest rank, at most `rank`, whose relative error is at most `error`. sigma: (n). rest: the
   sum of the squares of the singular values that sigma lacks. */
static int64_t tt__rank_of(const double *sigma, int64_t n, double rest, int64_t rank, double error)
{
    double all = rest;
    for (int64_t k = n - 1; k >= 0; k--) all += sigma[k] * sigma[k];
    int64_t least = n;
    while (least > 1 && sqrt(rest + sigma[least - 1] * sigma[least - 1]) <= error * sqrt(all)) {
        rest += sigma[least - 1] * sigma[least - 1];
        least--;
    }
    return rank && rank < least ? rank : least;
}

/* Computes the factors of a weight (out, in): b (out, rank) and a (rank, in). Each gets the square root of a
   singular value, so that column k of b and row k of a have equal lengths. v: (rank or more, n) singular
   vectors of the smaller side, n = min(out, in). */
static void tt__low_factors(const float *w, int64_t out, int64_t in, const double *sigma, const double *v,
                            int64_t rank, float *b, float *a)
{
    const bool tall = out >= in;
    const int64_t n = tall ? in : out, m = tall ? out : in;
    for (int64_t k = 0; k < rank; k++) {
        const double root = sqrt(sigma[k]), *of = v + k * n;
        for (int64_t i = 0; i < n; i++)
            *(tall ? &a[k * in + i] : &b[i * rank + k]) = (float)(root > 0 ? of[i] * root : of[i]);
        for (int64_t i = 0, size; i < m; i += size) { /* reads runs of w, in whose order memory has them */
            double sum[256] = {0};
            size = tt__min(m - i, tall ? 1 : (int64_t)TT__COUNT(sum));
            for (int64_t j = 0; j < n; j++)
                for (int64_t c = 0; c < size; c++) sum[c] += of[j] * (tall ? w[i * n + j] : w[j * m + i + c]);
            for (int64_t c = 0; c < size; c++)
                *(tall ? &b[i * rank + k] : &a[k * in + i + c]) = (float)(root > 0 ? sum[c] / root : 0);
        }
    }
}

/* Reads elements of the product b * a, as the source of a parameter that has factors. */
static tt_status tt__low_read(void *source, int64_t first, int64_t n, float *to)
{
    const tt_param *p = (const tt_param *)source, *a = p->low_a, *b = p->low_b;
    const int64_t in = p->dims[1], rank = a->dims[0], row = first / in, rows = (first + n - 1) / in - row + 1;
    const int64_t from = row * rank / 4 * 4, count = (row + rows) * rank - from; /* tt__param_read begins at a
                                                                                    multiple of 4 */
    float *of_a = (float *)tt__alloc(p->ctx, sizeof *of_a * (size_t)a->size);
    float *of_b = (float *)tt__alloc(p->ctx, sizeof *of_b * (size_t)count);
    tt_status status = of_a && of_b ? tt__param_read(a, 0, a->size, of_a) : TT_ERR_MEMORY;
    if (status == TT_OK) status = tt__param_read(b, from, count, of_b);
    for (int64_t k = 0; k < n && status == TT_OK; k++) {
        const int64_t r = (first + k) / in, c = (first + k) % in;
        const float *row_b = of_b + (r * rank - from);
        double sum = 0;
        for (int64_t i = 0; i < rank; i++) sum += (double)row_b[i] * (double)of_a[i * in + c];
        to[k] = (float)sum;
    }
    tt__free(p->ctx, of_a);
    tt__free(p->ctx, of_b);
    return status;
}

/* Makes the factors of parameter p, and their values. w: the values of p. */
static tt_status tt__low_make(tt_param *p, int64_t rank, const float *w, const double *sigma, const double *v)
{
    const int64_t out = p->dims[0], in = p->dims[1], dims[2][2] = {{rank, in}, {out, rank}};
    const tt_init zeros = {TT_INIT_ZEROS, 0};
    const size_t stem = strlen(p->name);
    const int params = p->ctx->n_params;
    char *name = (char *)tt__alloc(p->ctx, stem + sizeof ".low_A");
    float *b = (float *)tt__alloc(p->ctx, sizeof *b * (size_t)(rank * (out + in))), *a = b + out * rank;
    tt_param *factor[2] = {NULL, NULL};
    tt_status status = name && b ? TT_OK : TT_ERR_MEMORY;
    if (status == TT_OK) tt__low_factors(w, out, in, sigma, v, rank, b, a);
    for (int k = 0; k < 2 && status == TT_OK; k++) {
        sprintf(name, "%s.low_%c", p->name, 'A' + k);
        factor[k] = tt__param_make(p->ctx, name, 2, dims[k], zeros);
        status = factor[k] ? tt_param_set(factor[k], k ? b : a) : p->ctx->status;
        if (status != TT_OK) break;
        factor[k]->frozen = p->frozen;
        factor[k]->factor = true;
    }
    tt__free(p->ctx, name);
    tt__free(p->ctx, b);
    if (status != TT_OK) {
        tt__params_undo(p->ctx, params);
        return status;
    }
    tt__param_drop_source(p);
    p->low_a = factor[0];
    p->low_b = factor[1];
    p->read = tt__low_read;
    p->source = p;
    return TT_OK;
}

tt_status tt_param_low_rank(tt_param *p, int rank, float error)
{
    tt_context *ctx = p->ctx;
    const char *why = p->ndim != 2 ? "must have two dimensions" :
                      p->low_a ? "has factors already: train these" :
                      p->factor ? "is a factor of another weight: leave it whole" :
                      p->rounding ? "is rounded (tt_param_round), but its factors would not be: end the "
                                    "rounding (TT_ROUND_NONE)" :
                      tt__is_coded(p->form) ? "is stored in few bits, but factors are floats: store it as "
                                              "floats (tt_param_store with NULL)" : NULL;
    if (why) return tt__fail(ctx, TT_ERR_ARGUMENT, "low rank: parameter '%s' %s", p->name, why);
    if (rank < 0 || !(error >= 0 && error < 1))
        return tt__fail(ctx, TT_ERR_ARGUMENT, "low rank: rank is %d and error %g, but rank must be at least "
                        "0, and error in [0, 1)", rank, (double)error);
    tt_status status = tt__params_leave(ctx, p);
    if (status != TT_OK) return status;
    const int64_t out = p->dims[0], in = p->dims[1], n = tt__min(out, in), m = tt__max(out, in);
    const bool leading = rank && n > TT__SVD_WHOLE && rank + TT__SVD_MORE <= n / 2;
    const int64_t many = leading ? rank + TT__SVD_MORE : n; /* singular values that are computed */
    double rest = 0; /* the sum of the squares of the others */
    if (rank && !(error > 0) && rank * (out + in) >= out * in) return TT_OK;
    float *w = (float *)tt__alloc(ctx, sizeof *w * (size_t)p->size);
    double *x = (double *)tt__alloc(ctx, sizeof *x * (size_t)p->size);
    double *sigma = (double *)tt__alloc(ctx, sizeof *sigma * (size_t)many);
    double *v = (double *)tt__alloc(ctx, sizeof *v * (size_t)many * (size_t)n);
    status = w && x && sigma && v ? tt_param_get(p, w) : TT_ERR_MEMORY;
    for (int64_t k = 0; k < p->size && status == TT_OK; k++) {
        const int64_t r = k / in, c = k % in;
        x[out >= in ? c * m + r : r * m + c] = w[k];
        rest += leading ? (double)w[k] * w[k] : 0;
        if (!isfinite(w[k]))
            status = tt__fail(ctx, TT_ERR_NUMERIC, "low rank: element %lld of parameter '%s' is not finite",
                              (long long)k, p->name);
    }
    if (status == TT_OK)
        status = leading ? tt__svd_leading(ctx, x, m, n, many, sigma, v) : tt__svd(ctx, x, m, n, sigma, v);
    for (int64_t k = 0; k < many && leading && status == TT_OK; k++) rest -= sigma[k] * sigma[k];
    const int64_t kept = status == TT_OK ? tt__rank_of(sigma, many, fmax(rest, 0), rank, error) : 0;
    if (status == TT_OK && kept * (out + in) < out * in) status = tt__low_make(p, kept, w, sigma, v);
    tt__free(ctx, w);
    tt__free(ctx, x);
    tt__free(ctx, sigma);
    tt__free(ctx, v);
    return status;
}

int tt_param_rank(const tt_param *p) { return p->low_a ? (int)p->low_a->dims[0] : 0; }
