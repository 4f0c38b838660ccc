#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"
#include "../passes/features.h"
#include "../compile/program.h"
#include "../run/inputs.h"

/* ===========================================================================================================
   TRAIN                                                                                            src/train/
   Learning-rate schedules, training steps, evaluation, prediction, distillation, the reference of pairs of
   answers, contrastive losses of whole steps, features, moving averages, the state of a run in one file, and
   tt_fit. This code uses all sections above.
   ======================================================================================================== */

/* ------------------------------------------------------------------------------------------------- features
   The features (src/passes/features.h) of each example of a source, computed once and kept in the host's
   memory. */

/* The features of a source's examples. An example's features are stored one after another. A feature takes
   one row or, if by_token, one row for each token of the example. */
typedef struct tt__feature_set {
    int64_t examples;   /* 1 + the largest index of an example */
    int64_t room;       /* number of examples that `place` and `tokens` have room for */
    size_t *place;      /* for each example, the place in `data` of its features; SIZE_MAX: there is none */
    int32_t *tokens;    /* for each example, its number of tokens */
    float *data;        /* `size` floats */
    size_t size;
} tt__feature_set;

typedef struct tt__features {
    tt_context *ctx;
    int count;
    tt_value *value;    /* (count) the features, which are outputs of one program and inputs of others */
    int64_t *width;     /* (count) columns of each feature */
    bool *by_token;     /* (count) the feature has a row for each token, not for each example */
    float *rows;        /* memory for one feature of a micro-batch */
    size_t capacity;    /* floats that `rows` has room for */
    tt__feature_set set[2]; /* [0]: of the source to train on; [1]: of the source to validate on */
    const tt__feature_set *now; /* the set that micro-batches are taken from; NULL: none */
} tt__features;

static void tt__feature_set_free(tt_context *ctx, tt__feature_set *s)
{
    tt__free(ctx, s->place);
    tt__free(ctx, s->tokens);
    tt__free(ctx, s->data);
    memset(s, 0, sizeof *s);
}

static void tt__features_free(tt__features *f)
{
    if (!f) return;
    for (int k = 0; k < 2; k++) tt__feature_set_free(f->ctx, &f->set[k]);
    tt__free(f->ctx, f->value);
    tt__free(f->ctx, f->width);
    tt__free(f->ctx, f->by_token);
    tt__free(f->ctx, f->rows);
    tt__free(f->ctx, f);
}

/* Returns the axis of the input `name` of a tape. Returns 0 if the tape has no such input. */
static int32_t tt__axis_of_input(const tt_tape *t, const char *name)
{
    for (int32_t v = 1; v < t->n_values; v++)
        if (t->values[v].storage == TT__INPUT && strcmp(t->values[v].name, name) == 0)
            return t->values[v].shape.axis;
    return 0;
}

/* Finds the features of a recorded tape. Sets *head to a copy of the tape that reads the features as inputs;
   the caller frees the copy. Returns NULL on error. */
static tt__features *tt__features_new(tt_tape *t, tt_value output, tt_tape **head)
{
    tt_context *ctx = t->ctx;
    int32_t *list = NULL;
    int count = 0;
    tt__features *f = (tt__features *)tt__calloc(ctx, sizeof *f);
    tt_status status = f ? tt__find_features(t, output, &list, &count) : TT_ERR_MEMORY;
    int32_t axis = tt__axis_of_input(t, "positions"); /* the axis of tokens */
    if (!axis) axis = tt__axis_of_input(t, "ids");
    *head = status == TT_OK ? tt__copy_tape(t) : NULL;
    if (status == TT_OK) status = *head ? tt__read_features(*head, list, count) : TT_ERR_MEMORY;
    if (f) {
        f->ctx = ctx;
        f->count = count;
        f->value = (tt_value *)tt__calloc(ctx, sizeof *f->value * ((size_t)count + 1));
        f->width = (int64_t *)tt__calloc(ctx, sizeof *f->width * ((size_t)count + 1));
        f->by_token = (bool *)tt__calloc(ctx, sizeof *f->by_token * ((size_t)count + 1));
    }
    if (status == TT_OK && !(f->value && f->width && f->by_token)) status = TT_ERR_MEMORY;
    for (int k = 0; k < count && status == TT_OK; k++) {
        const tt__shape *x = &t->values[list[k]].shape;
        const size_t most = (size_t)x->rows * (size_t)x->cols;
        f->value[k] = tt__handle(t, list[k]);
        f->width[k] = x->cols;
        f->by_token[k] = axis && x->axis == axis;
        if (most > f->capacity) f->capacity = most;
    }
    if (status == TT_OK && !(f->rows = (float *)tt__alloc(ctx, sizeof *f->rows * f->capacity)))
        status = TT_ERR_MEMORY;
    tt__free(ctx, list);
    if (status == TT_OK) return f;
    tt_tape_free(*head);
    *head = NULL;
    tt__features_free(f);
    return NULL;
}

/* Returns the number of tokens of sequence s of a batch. same: the number of tokens of every sequence. If
   `same` is 0, seq_start of the batch tells the number; without seq_start, it is 1. */
static int32_t tt__tokens_in(const tt_batch *b, int s, int same)
{
    return same ? same : b->seq_start ? b->seq_start[s + 1] - b->seq_start[s] : 1;
}

/* Returns the number of rows that feature k of an example has. */
static int64_t tt__feature_rows(const tt__features *f, int k, int64_t tokens)
{
    return f->by_token[k] ? tokens : 1;
}

/* Fails unless a batch has the index of each example. */
static tt_status tt__has_index(tt_context *ctx, const tt_batch *b)
{
    if (!b->index)
        return tt__fail(ctx, TT_ERR_ARGUMENT, "{features_once} needs the index of each example in the "
                        "dataset, but a batch has none: set tt_batch.index, or clear {features_once}");
    for (int s = 0; s < b->seqs; s++)
        if (b->index[s] < 0 || b->index[s] >= INT32_MAX)
            return tt__fail(ctx, TT_ERR_ARGUMENT, "{features_once}: example %d of a batch has index %lld, "
                            "but indices must be 0 to 2^31 - 2", s, (long long)b->index[s]);
    return TT_OK;
}

/* Gives the examples of a batch their places in a set. same: the number of tokens of every example; 0:
   examples may differ. */
static tt_status tt__feature_places(const tt__features *f, tt__feature_set *to, const tt_batch *b, int same)
{
    tt_status status = tt__has_index(f->ctx, b);
    for (int s = 0; s < b->seqs && status == TT_OK; s++) {
        const int64_t at = b->index[s], tokens = tt__tokens_in(b, s, same);
        if (at >= to->room) {
            const int64_t room = 2 * at + 1024;
            void *place = tt__realloc(f->ctx, to->place, sizeof *to->place * (size_t)room);
            if (place) to->place = (size_t *)place;
            void *n = place ? tt__realloc(f->ctx, to->tokens, sizeof *to->tokens * (size_t)room) : NULL;
            if (!n) return TT_ERR_MEMORY;
            to->tokens = (int32_t *)n;
            to->room = room;
        }
        while (to->examples <= at) to->place[to->examples++] = SIZE_MAX;
        if (to->place[at] != SIZE_MAX)
            return tt__fail(f->ctx, TT_ERR_ARGUMENT, "{features_once}: the index %lld occurs twice in epoch "
                            "0 of a source, but each example needs an index of its own", (long long)at);
        to->place[at] = to->size;
        to->tokens[at] = (int32_t)tokens;
        for (int k = 0; k < f->count; k++)
            to->size += (size_t)(tt__feature_rows(f, k, tokens) * f->width[k]);
    }
    return status;
}

/* Returns where set->data has feature k of the example with index `at`. Returns NULL if the set lacks the
   example, or if the example in the set has another number of tokens. */
static float *tt__feature_at(const tt__features *f, const tt__feature_set *set, int k, int64_t at,
                             int64_t tokens)
{
    if (at >= set->examples || set->place[at] == SIZE_MAX || set->tokens[at] != tokens) return NULL;
    size_t place = set->place[at];
    for (int j = 0; j < k; j++) place += (size_t)(tt__feature_rows(f, j, tokens) * f->width[j]);
    return set->data + place;
}

/* Copies the features of a micro-batch into a set. Data rank `rank` of program p has computed the
   features. */
static tt_status tt__features_get(const tt__features *f, tt_program *p, int rank, const tt__feature_set *to,
                                  const int64_t *index, const int32_t *tokens, int seqs)
{
    tt_status status = TT_OK;
    for (int k = 0; k < f->count && status == TT_OK; k++) {
        const float *from = f->rows;
        status = tt_get_rank(p, rank, f->value[k], f->rows, f->capacity);
        for (int s = 0; s < seqs && status == TT_OK; s++) {
            const size_t n = (size_t)(tt__feature_rows(f, k, tokens[s]) * f->width[k]);
            float *place = tt__feature_at(f, to, k, index[s], tokens[s]);
            if (!place)
                return tt__fail(f->ctx, TT_ERR_ARGUMENT, "{features_once}: the source gives other examples "
                                "when epoch 0 is read again (index %lld): let seek repeat an epoch exactly",
                                (long long)index[s]);
            memcpy(place, from, sizeof *from * n);
            from += n;
        }
    }
    return status;
}

/* Sets the inputs of a data rank of program p, which reads features, to the features of a batch's examples.
   same: the number of tokens of every example; 0: examples may differ. */
static tt_status tt__features_set(const tt__features *f, tt_program *p, int rank, const tt_batch *b, int same)
{
    tt_status status = tt__has_index(f->ctx, b);
    for (int k = 0; k < f->count && status == TT_OK; k++) {
        float *to = f->rows;
        int64_t rows = 0;
        for (int s = 0; s < b->seqs && status == TT_OK; s++) {
            const int64_t tokens = tt__tokens_in(b, s, same), n = tt__feature_rows(f, k, tokens);
            const float *from = tt__feature_at(f, f->now, k, b->index[s], tokens);
            if (!from)
                return tt__fail(f->ctx, TT_ERR_ARGUMENT, "{features_once}: the example with index %lld was "
                                "not in epoch 0 of its source, or has changed: each epoch must have the "
                                "examples of epoch 0 (without drop_last)", (long long)b->index[s]);
            rows += n;
            if ((size_t)(rows * f->width[k]) > f->capacity)
                return tt__fail(f->ctx, TT_ERR_SHAPE, "the batch has %d sequences, which are more than the "
                                "trainer has room for: raise max_seqs or max_tokens", b->seqs);
            memcpy(to, from, sizeof *to * (size_t)(n * f->width[k]));
            to += n * f->width[k];
        }
        status = tt_set_rank(p, rank, f->value[k], f->rows, rows);
    }
    return status;
}
