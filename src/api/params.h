#pragma once
#include "standard.h"
#include "context.h"

/* ---------------------------------------------------------------------------------- dtypes and parameters */

typedef enum tt_dtype { TT_F32, TT_BF16, TT_F16, TT_I32, TT_U8, TT_DTYPE_COUNT } tt_dtype;

size_t tt_dtype_bytes(tt_dtype dtype);
const char *tt_dtype_name(tt_dtype dtype); /* "f32" */

typedef enum tt_init_kind { TT_INIT_ZEROS, TT_INIT_ONES, TT_INIT_NORMAL, TT_INIT_UNIFORM } tt_init_kind;

typedef struct tt_init { /* initial values of a parameter that neither a file nor tt_param_set fills */
    tt_init_kind kind;
    float scale; /* standard deviation of NORMAL (mean 0); half-width of UNIFORM */
} tt_init;

/* Makes a parameter of up to 4 dimensions. The name must be unique in the context. A parameter needs no
   memory until a program that uses it allocates its arena. Then the parameter is filled in place: from its
   file, from tt_param_set, or from `init` by a counter-based generator (the same values for every dtype,
   device and number of threads). */
tt_param *tt_param_new(tt_context *ctx, const char *name, int ndim, const int64_t *dims, tt_init init);
const char *tt_param_name(const tt_param *p);
int tt_param_ndim(const tt_param *p);
const int64_t *tt_param_dims(const tt_param *p);
int64_t tt_param_size(const tt_param *p);
/* Copy tt_param_size floats to or from the parameter, converted to or from its dtype. */
tt_status tt_param_set(tt_param *p, const float *values);
tt_status tt_param_get(const tt_param *p, float *values);
tt_param *tt_param_find(tt_context *ctx, const char *name); /* NULL if no parameter has that name */
/* tt_param_at returns parameter k of a context, in the order of their creation, k from 0 to tt_param_count -
   1, or NULL if k is outside that range. */
int tt_param_count(const tt_context *ctx);
tt_param *tt_param_at(const tt_context *ctx, int k);

/* Marks the parameters whose names match a pattern as frozen or trainable. In the pattern '*' stands for any
   run of characters, '?' for one character, '[0-3a]' for one of 0, 1, 2, 3 and a. In programs compiled
   afterwards a frozen parameter has no gradient, no optimizer state and no work in the backward. Returns the
   number of matching parameters. */
int tt_param_freeze(tt_context *ctx, const char *pattern, bool frozen);
bool tt_param_frozen(const tt_param *p);

/* A parameter, or the shard of it that a rank updates, for a function that is an optimizer. */
typedef struct tt_custom_update {
    const char *name;      /* name of the parameter */
    float *parameter;      /* n numbers, to be updated in place */
    const float *gradient; /* n numbers: the gradient of the mean loss, after clipping */
    float *state[2];       /* n numbers of each optimizer state, 0 before the first step; NULL: no such
                              state */
    int64_t n, first;      /* first: index of parameter[0] in the whole parameter */
    int64_t step;          /* number of steps before the current step */
    float lr, weight_decay; /* this parameter's learning rate and weight decay, after no_decay, lr_rules and
                               layer_decay */
} tt_custom_update;

/* An optimizer that the caller writes, on the CPU (TT_OPTIMIZER_CUSTOM). It must outlive its programs. */
typedef struct tt_custom_optimizer {
    /* Updates a parameter. Several ranks call the function at once, each from its own thread. After an error
       the run fails, and can only continue from the last saved state. */
    tt_status (*update)(void *user, const tt_custom_update *u);
    void *user;            /* argument of `update` */
    int states;            /* number of states, 0 to 2 */
} tt_custom_optimizer;
