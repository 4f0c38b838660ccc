#pragma once
#include "standard.h"
#include "context.h"

/* -------------------------------------------------------------------------------------------------- files */

/* A safetensors file (github.com/huggingface/safetensors, format of the README), fully checked when opened:
   header length, JSON, dtypes, dims, offsets inside the file, no overlap, no hole, no duplicate name, sizes.
   It stays open, and its tensors are read when they are asked for, by any number of threads. */
typedef struct tt_safetensors tt_safetensors;

typedef struct tt_tensor_info {
    const char *name;
    const char *dtype; /* as the format spells it: "F32", "BF16", "F16", "F64", "I64", "I32", "U8", ... */
    int ndim;
    int64_t dims[8];
    size_t bytes;
} tt_tensor_info;

tt_safetensors *tt_safetensors_open(tt_context *ctx, const char *path); /* NULL on error */
void tt_safetensors_close(tt_safetensors *s);
int tt_safetensors_count(const tt_safetensors *s);
const tt_tensor_info *tt_safetensors_info(const tt_safetensors *s, int i);
int tt_safetensors_find(const tt_safetensors *s, const char *name);       /* -1 if absent */
/* Returns the value of a key of "__metadata__"; NULL if absent. */
const char *tt_safetensors_metadata(const tt_safetensors *s, const char *key);
/* Reads n of a tensor's bytes, which are little-endian, from byte `first` on. All reads fail with
   TT_ERR_FILE, and name the file and the byte, if another program has cut the file off meanwhile. */
tt_status tt_safetensors_read(const tt_safetensors *s, int i, size_t first, size_t n, void *to);
/* Reads n elements from `first` on, as floats (F64, F32, BF16, F16) or as int32 (I8 to I64, U8 to U64, BOOL).
   A finite number that the result cannot hold fails, naming the element. */
tt_status tt_safetensors_read_f32(const tt_safetensors *s, int i, int64_t first, int64_t n, float *to);
tt_status tt_safetensors_read_i32(const tt_safetensors *s, int i, int64_t first, int64_t n, int32_t *to);

/* Writing streams: declare all tensors, then write their bytes in that order, in pieces of any size. The file
   appears under its name, synced, only when tt_safetensors_end returns TT_OK; until then an old file of that
   name stays whole. */
typedef struct tt_safetensors_writer tt_safetensors_writer;
/* tensors: all but `bytes` is read. metadata: pairs of strings key, value, ..., NULL; may be NULL. */
tt_safetensors_writer *tt_safetensors_begin(tt_context *ctx, const char *path, const tt_tensor_info *tensors,
                                            int count, const char *const *metadata);
tt_status tt_safetensors_write(tt_safetensors_writer *w, const void *bytes, size_t n);
/* Frees w in any case; fails if bytes are missing or were too many. */
tt_status tt_safetensors_end(tt_safetensors_writer *w);
