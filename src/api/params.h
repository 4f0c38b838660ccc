#pragma once
#include "standard.h"
#include "context.h"

/* ---------------------------------------------------------------------------------- dtypes and parameters */

typedef enum tt_dtype { TT_F32, TT_BF16, TT_F16, TT_I32, TT_U8, TT_DTYPE_COUNT } tt_dtype;

size_t tt_dtype_bytes(tt_dtype dtype);
const char *tt_dtype_name(tt_dtype dtype); /* "f32" */

typedef enum tt_init_kind { TT_INIT_ZEROS, TT_INIT_ONES, TT_INIT_NORMAL, TT_INIT_UNIFORM } tt_init_kind;

typedef struct tt_init { /* how a parameter starts when no file or tt_param_set gives it values */
    tt_init_kind kind;
    float scale; /* standard deviation of NORMAL (mean 0); half-width of UNIFORM */
} tt_init;

/* A parameter of up to 4 dimensions. The name must be unique in the context. It takes no memory until a
   program that uses it allocates, and is then filled in place: from its file, from tt_param_set, or from
   `init` by the counter-based generator (the same values for every dtype, device and number of threads). */
tt_param *tt_param_new(tt_context *ctx, const char *name, int ndim, const int64_t *dims, tt_init init);
const char *tt_param_name(const tt_param *p);
int tt_param_ndim(const tt_param *p);
const int64_t *tt_param_dims(const tt_param *p);
int64_t tt_param_size(const tt_param *p);
/* Both take tt_param_size floats, converted to and from its dtype. */
tt_status tt_param_set(tt_param *p, const float *values);
tt_status tt_param_get(const tt_param *p, float *values);
tt_param *tt_param_find(tt_context *ctx, const char *name); /* NULL if there is none */
/* Parameters 0 to tt_param_count - 1 are those of a context in the order in which they were made; NULL where
   there is no number k. */
int tt_param_count(const tt_context *ctx);
tt_param *tt_param_at(const tt_context *ctx, int k);

/* Marks the parameters whose name matches a pattern ('*' any run of characters, '?' one, '[0-3a]' one of
   these) as frozen or trainable. A frozen parameter takes no gradient, no optimizer state and no backward
   work in programs compiled afterwards. Returns how many matched. */
int tt_param_freeze(tt_context *ctx, const char *pattern, bool frozen);
bool tt_param_frozen(const tt_param *p);
