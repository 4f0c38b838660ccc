#pragma once
#include "standard.h"
#include "context.h"

/* -------------------------------------------------------------------------------------------------- files */

/* A safetensors file (github.com/huggingface/safetensors, format of the README). tt_safetensors_open checks
   the whole header: length, JSON, dtypes, dims, sizes, offsets inside the file, no overlap, no hole, no
   duplicate name. The file stays open, and its tensors are read on request, by any number of threads. */
typedef struct tt_safetensors tt_safetensors;

typedef struct tt_tensor_info {
    const char *name;
    const char *dtype; /* the format's name: "F32", "BF16", "F16", "F64", "I64", "I32", "U8", ... */
    int ndim;
    int64_t dims[8];
    size_t bytes;
} tt_tensor_info;

tt_safetensors *tt_safetensors_open(tt_context *ctx, const char *path); /* NULL on error */
void tt_safetensors_close(tt_safetensors *s);
int tt_safetensors_count(const tt_safetensors *s);
const tt_tensor_info *tt_safetensors_info(const tt_safetensors *s, int i);
int tt_safetensors_find(const tt_safetensors *s, const char *name);       /* returns -1 if absent */
/* Returns the value of a key of "__metadata__", or NULL if the key is absent. */
const char *tt_safetensors_metadata(const tt_safetensors *s, const char *key);
/* Reads n bytes of a tensor (little-endian) from byte `first` on. If another program has truncated the file
   meanwhile, this function, tt_safetensors_read_f32 and tt_safetensors_read_i32 fail with TT_ERR_FILE and
   name the file and the byte. */
tt_status tt_safetensors_read(const tt_safetensors *s, int i, size_t first, size_t n, void *to);
/* Read n elements, from element `first` on. tt_safetensors_read_f32 converts F64, F32, BF16 and F16 to float.
   tt_safetensors_read_i32 converts I8 to I64, U8 to U64 and BOOL to int32. Both functions fail, and name the
   element, if a finite number is out of the result's range. */
tt_status tt_safetensors_read_f32(const tt_safetensors *s, int i, int64_t first, int64_t n, float *to);
tt_status tt_safetensors_read_i32(const tt_safetensors *s, int i, int64_t first, int64_t n, int32_t *to);

/* Writes a safetensors file as a stream: declare all tensors, then write their bytes in that order, in chunks
   of any size. The file appears under its name, synced to the disk, only when tt_safetensors_end returns
   TT_OK; until then an old file of that name stays whole. */
typedef struct tt_safetensors_writer tt_safetensors_writer;
/* Begins a file. tensors: `count` descriptions, whose field `bytes` is not read. metadata: strings key,
   value, ..., NULL; may be NULL. */
tt_safetensors_writer *tt_safetensors_begin(tt_context *ctx, const char *path, const tt_tensor_info *tensors,
                                            int count, const char *const *metadata);
tt_status tt_safetensors_write(tt_safetensors_writer *w, const void *bytes, size_t n);
/* Ends the file and frees w in any case. Fails if bytes are missing or too many. */
tt_status tt_safetensors_end(tt_safetensors_writer *w);
