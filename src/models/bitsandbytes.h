#pragma once
#include "../base/base.h"
#include "../base/codes.h"
#include "../tape/tape.h"
#include "../context/coded.h"
#include "../context/params.h"
#include "../files/lists.h"
#include "../files/json.h"
#include "../files/safetensors.h"
#include "layout.h"
#include "few_bits.h"

/* -------------------------------------------------------------------------- weights in bitsandbytes' layout
   transformers saves the weight of a linear layer that bitsandbytes has quantised as several tensors. The
   rows have the order (out, in), also for GPT-2, whose other files have the transpose.
   8 bits: `weight` has the codes, I8 (rows, width), and `SCB` the scales, F32 (rows); value = code * scale /
   127. `weight_format` is 0.
   4 bits: `weight` has two codes a byte, the first in the high half. `weight.quant_map` has the number of
   each code, F32 (16), and `weight.quant_state.bitsandbytes__nf4` (or fp4) a JSON text with the sizes.
   `weight.absmax` has the scales of blocks of elements, F32, or with double quantisation their codes, U8:
   scale = nested_quant_map[code] * nested_absmax[code's number / nested_blocksize] + nested_offset. */

#define TT__BNB_STATE ".quant_state.bitsandbytes__"
static const char *const tt__bnb_types[] = {"nf4", "fp4"};

/* A quantised weight in a file, the source of a parameter. */
typedef struct tt__bnb {
    tt_safetensors *file;
    tt_dtype dtype;       /* dtype of the coded matrix that has the file's codes and scales; TT_F32: none */
    bool bytes;           /* a code has 8 bits */
    int codes, scales, nested, map; /* indices of tensors in the file; nested, map: -1 if scales are F32 */
    int tensors;          /* number of tensors that belong to the weight */
    int64_t rows, width;
    int64_t block, nested_block; /* elements that share a scale; scales that share a nested scale */
    float offset, numbers[16];   /* numbers: the number of each code of 4 bits */
    tt__packing order;
    float *scale;         /* the scale of each block while elements are read; NULL: not read yet */
} tt__bnb;

/* Returns the number of rows of a coded matrix that stay together in files of the given order of rows. */
static int64_t tt__bnb_unit(const tt__packing *order, int64_t rows)
{
    return order->kind == 'g' ? order->size : rows;
}

/* Returns the index of the quantised weight's JSON text, or -1 if the file has no such tensor. name: the
   tensor of the codes. */
static int tt__bnb_state(const tt_safetensors *s, const char *name, const char **type)
{
    char state[400];
    for (int k = 0; k < TT__COUNT(tt__bnb_types); k++) {
        snprintf(state, sizeof state, "%.300s" TT__BNB_STATE "%s", name, *type = tt__bnb_types[k]);
        const int at = tt_safetensors_find(s, state);
        if (at >= 0) return at;
    }
    return -1;
}

/* Returns whether tensor `index` of a file has codes of a quantised weight. The scales of a weight that
   few_bits.h packs have another name. */
static bool tt__is_bnb(const tt_safetensors *s, int index)
{
    const char *type, *dtype = s->infos[index].dtype;
    char scales[400];
    snprintf(scales, sizeof scales, "%.300s_scale", s->infos[index].name);
    if (tt_safetensors_find(s, scales) >= 0) return false;
    return strcmp(dtype, "I8") == 0 || strcmp(dtype, "U8") == 0 ||
           tt__bnb_state(s, s->infos[index].name, &type) >= 0;
}

/* Fails unless the file has the tensor `name` with `count` elements of type `dtype`. Sets *index. */
static tt_status tt__bnb_find(const tt_safetensors *s, const char *weight, const char *name,
                              const char *dtype, int64_t count, int *index)
{
    *index = tt_safetensors_find(s, name);
    if (*index < 0)
        return tt__fail(s->ctx, TT_ERR_FORMAT, "'%s': the quantised tensor '%s' needs the tensor '%s', which "
                        "the file lacks: save the model again, or copy the file again", s->path, weight,
                        name);
    const tt_tensor_info *info = &s->infos[*index];
    int64_t n = 1;
    for (int k = 0; k < info->ndim; k++) n *= info->dims[k]; /* the file's size bounds the product */
    if (strcmp(info->dtype, dtype) == 0 && n == count) return TT_OK;
    return tt__fail(s->ctx, TT_ERR_FORMAT, "'%s': tensor '%s' has %lld elements of %s, but the quantised "
                    "tensor '%s' needs %lld of %s: save the model again, or copy the file again", s->path,
                    name, (long long)n, info->dtype, weight, (long long)count, dtype);
}

/* Finds the scales of a weight with codes of 8 bits. */
static tt_status tt__bnb_open_rows(tt__bnb *b, const tt_tensor_info *info)
{
    char name[400];
    int format;
    uint8_t value = 0;
    const size_t module = strlen(info->name) - strlen("weight");
    b->bytes = true;
    b->block = b->width;
    b->dtype = TT__INT8;
    b->tensors = 2;
    snprintf(name, sizeof name, "%.*s" "SCB", (int)tt__min((int64_t)module, 300), info->name);
    tt_status status = tt__bnb_find(b->file, info->name, name, "F32", b->rows, &b->scales);
    snprintf(name, sizeof name, "%.*s" "weight_format", (int)tt__min((int64_t)module, 300), info->name);
    if (status != TT_OK || tt_safetensors_find(b->file, name) < 0) return status;
    b->tensors++;
    status = tt__bnb_find(b->file, info->name, name, "U8", 1, &format);
    if (status == TT_OK) status = tt_safetensors_read(b->file, format, 0, 1, &value);
    if (status == TT_OK && value)
        status = tt__fail(b->file->ctx, TT_ERR_UNSUPPORTED, "'%s': tensor '%s' is %d; only 0, the order of "
                          "rows, is supported: save the model with a newer bitsandbytes", b->file->path, name,
                          value);
    return status;
}

/* Reads the JSON text that describes codes of 4 bits. Sets *nested to whether the scales are coded. */
static tt_status tt__bnb_read_state(tt__bnb *b, int state, const char *type, bool *nested)
{
    tt_context *ctx = b->file->ctx;
    const tt_tensor_info *info = &b->file->infos[state];
    char path[TT__PATH + 400], *text = (char *)tt__alloc(ctx, info->bytes + 1);
    const char *said = type;
    int64_t dims[2] = {0, 0};
    tt__json j;
    memset(&j, 0, sizeof j);
    snprintf(path, sizeof path, "%.*s: %.300s", TT__PATH, b->file->path, info->name);
    tt_status status = text ? tt_safetensors_read(b->file, state, 0, info->bytes, text) : TT_ERR_MEMORY;
    if (status == TT_OK) status = tt__json_parse(&j, ctx, path, 0, text, info->bytes);
    if (status == TT_OK) status = tt__json_read_string(&j, 0, "quant_type", true, &said);
    if (status == TT_OK) status = tt__json_read_int(&j, 0, "blocksize", true, 1, 1 << 20, &b->block);
    const int shape = status == TT_OK ? tt__json_get(&j, 0, "shape") : -1;
    for (int k = 0; shape >= 0 && k < 2 && j.nodes[shape].kind == TT__JSON_ARRAY; k++)
        if (j.nodes[shape].count == 2 && j.nodes[shape + 1 + k].exact)
            dims[k] = j.nodes[shape + 1 + k].integer;
    *nested = status == TT_OK && tt__json_get(&j, 0, "nested_blocksize") >= 0;
    if (*nested) status = tt__json_read_int(&j, 0, "nested_blocksize", true, 1, 1 << 20, &b->nested_block);
    const int kinds = 1 << TT__JSON_NUMBER_KIND;
    const int offset = !*nested || status != TT_OK ? -1
        : tt__json_member(&j, 0, "nested_offset", true, kinds, "a number", &status);
    if (offset >= 0) status = tt__json_float_at(&j, "nested_offset", offset, -FLT_MAX, INFINITY, &b->offset);
    if (status == TT_OK && (dims[0] != b->rows || dims[1] != b->width || strcmp(said, type) != 0))
        status = tt__fail(ctx, TT_ERR_FORMAT, "'%s' describes a matrix (%lld, %lld) of %s; expected (%lld, "
                          "%lld) of %s: is the config.json that of this file?", path, (long long)dims[0],
                          (long long)dims[1], said, (long long)b->rows, (long long)b->width, type);
    tt__json_free(&j);
    tt__free(ctx, text);
    return status;
}

/* Finds the scales of a weight with codes of 4 bits. Sets b->dtype to TT__NF4 if a coded matrix of this
   library can hold the codes and the scales unchanged. */
static tt_status tt__bnb_open_blocks(tt__bnb *b, const tt_tensor_info *info)
{
    static const char *const more[] = {".quant_map", ".absmax", ".nested_absmax", ".nested_quant_map"};
    const char *type;
    const int64_t count = b->rows * b->width;
    bool nested = false;
    int index[4] = {-1, -1, -1, -1};
    const int state = tt__bnb_state(b->file, info->name, &type);
    if (state < 0)
        return tt__fail(b->file->ctx, TT_ERR_FORMAT, "'%s': tensor '%s' has dtype U8, but the file lacks '%s"
                        TT__BNB_STATE "nf4', which says what its codes mean: save the model again, or copy "
                        "the file again", b->file->path, info->name, info->name);
    tt_status status = tt__bnb_read_state(b, state, type, &nested);
    if (status != TT_OK) return status;
    const int64_t blocks = (count + b->block - 1) / b->block;
    const int64_t counts[] = {16, blocks, nested ? (blocks + b->nested_block - 1) / b->nested_block : 0, 256};
    for (int k = 0; k < (nested ? 4 : 2) && status == TT_OK; k++) {
        char name[400];
        snprintf(name, sizeof name, "%.300s%s", info->name, more[k]);
        status = tt__bnb_find(b->file, info->name, name, k == 1 && nested ? "U8" : "F32", counts[k],
                              &index[k]);
    }
    b->scales = index[1];
    b->nested = index[2];
    b->map = index[3];
    b->tensors = nested ? 6 : 4;
    if (status == TT_OK && info->bytes != (size_t)(count + 1) / 2)
        status = tt__fail(b->file->ctx, TT_ERR_FORMAT, "'%s': tensor '%s' has %zu bytes, but the codes of "
                          "(%lld, %lld) elements take %lld: save the model again, or copy the file again",
                          b->file->path, info->name, info->bytes, (long long)b->rows, (long long)b->width,
                          (long long)(count + 1) / 2);
    if (status == TT_OK) status = tt_safetensors_read_f32(b->file, index[0], 0, 16, b->numbers);
    const int64_t unit = tt__bnb_unit(&b->order, b->rows);
    const bool same = nested && b->block == TT__NF4_BLOCK && b->nested_block == TT__NF4_NESTED &&
                      memcmp(b->numbers, tt__nf4_numbers, sizeof b->numbers) == 0 &&
                      b->width % TT__NF4_BLOCK == 0 &&
                      (unit == b->rows || unit * b->width % (TT__NF4_BLOCK * TT__NF4_NESTED) == 0);
    b->dtype = same ? TT__NF4 : TT_F32;
    return status;
}

/* Opens the quantised weight whose codes are tensor `index` of a file, and checks all tensors that belong to
   the weight. rows, width: the parameter's shape. order: the order of the file's rows. Does not share the
   file. */
static tt_status tt__bnb_open(tt__bnb *b, tt_safetensors *s, int index, int64_t rows, int64_t width,
                              const tt__packing *order)
{
    const tt_tensor_info *info = &s->infos[index];
    const char *const end = strrchr(info->name, '.');
    memset(b, 0, sizeof *b);
    b->file = s;
    b->codes = index;
    b->rows = rows;
    b->width = width;
    b->order = *order;
    b->nested = b->map = -1;
    if (b->order.kind == 't') b->order.kind = 0;
    if (!end || strcmp(end, ".weight") != 0 || strlen(info->name) > 300)
        return tt__fail(s->ctx, TT_ERR_UNSUPPORTED, "'%s': tensor '%.300s' has dtype %s, but only weights "
                        "may be quantised: save the model again with other modules", s->path, info->name,
                        info->dtype);
    if (strcmp(info->dtype, "I8") != 0) return tt__bnb_open_blocks(b, info);
    const int64_t dims[] = {rows, width};
    const tt__part_of whole = {0, 0};
    tt_status status = tt__tensor_fits(s, index, 2, dims, whole, info->name);
    return status == TT_OK ? tt__bnb_open_rows(b, info) : status;
}

/* Reads the scales of all blocks into b->scale. The multiplication is not fused with the addition, so that
   the scales equal those of tt__code_scales. */
static tt_status tt__bnb_scales(tt__bnb *b)
{
    tt_context *ctx = b->file->ctx;
    const int64_t blocks = (b->rows * b->width + b->block - 1) / b->block;
    const int64_t groups = b->nested < 0 ? 0 : (blocks + b->nested_block - 1) / b->nested_block;
    float *scale = (float *)tt__alloc(ctx, sizeof *scale * (size_t)blocks);
    float *nested = (float *)tt__alloc(ctx, sizeof *nested * (size_t)groups + 1), map[256];
    uint8_t *codes = (uint8_t *)tt__alloc(ctx, (size_t)blocks);
    tt_status status = scale && nested && codes ? TT_OK : TT_ERR_MEMORY;
    if (status == TT_OK && b->nested < 0)
        status = tt_safetensors_read_f32(b->file, b->scales, 0, blocks, scale);
    for (int64_t k = 0; status == TT_OK && b->bytes && k < blocks; k++) scale[k] /= 127;
    if (status == TT_OK && b->nested >= 0) {
        status = tt_safetensors_read(b->file, b->scales, 0, (size_t)blocks, codes);
        if (status == TT_OK) status = tt_safetensors_read_f32(b->file, b->nested, 0, groups, nested);
        if (status == TT_OK) status = tt_safetensors_read_f32(b->file, b->map, 0, 256, map);
        for (int64_t k = 0; k < blocks && status == TT_OK; k++) {
            volatile float product = map[codes[k]] * nested[k / b->nested_block];
            scale[k] = product + b->offset;
        }
    }
    tt__free(ctx, nested);
    tt__free(ctx, codes);
    if (status == TT_OK) b->scale = scale;
    else tt__free(ctx, scale);
    return status;
}

/* Reads the values of n elements, beginning with element `at` in the file's order. */
static tt_status tt__bnb_values(const tt__bnb *b, int64_t at, int64_t n, float *to)
{
    enum { AT_ONCE = 4096 };
    uint8_t piece[AT_ONCE + 1];
    tt_status status = TT_OK;
    for (int64_t part; n > 0 && status == TT_OK; at += part, to += part, n -= part) {
        part = tt__min(n, AT_ONCE);
        const int64_t first = b->bytes ? at : at / 2, end = b->bytes ? at + part : (at + part + 1) / 2;
        status = tt_safetensors_read(b->file, b->codes, (size_t)first, (size_t)(end - first), piece);
        for (int64_t k = 0; k < part && status == TT_OK; k++) {
            const int64_t e = at + k;
            const float number = b->bytes ? (float)(int8_t)piece[k]
                : b->numbers[piece[e / 2 - first] >> (e % 2 ? 0 : 4) & 15];
            to[k] = number * b->scale[e / b->block];
        }
    }
    return status;
}

/* Reads elements [first, first + n) of the parameter (tt_param.read). */
static tt_status tt__bnb_read(void *source, int64_t first, int64_t n, float *to)
{
    tt__bnb *b = (tt__bnb *)source;
    const int64_t unit = b->width * tt__bnb_unit(&b->order, b->rows), end = first + n;
    tt_status status = b->scale ? TT_OK : tt__bnb_scales(b);
    for (int64_t part; first < end && status == TT_OK; first += part, to += part) {
        const int64_t r = first / b->width;
        const int64_t at = b->order.kind == 'g' ? tt__packing_row(&b->order, r, false) : r;
        part = tt__min(end - first, unit - first % unit);
        status = tt__bnb_values(b, at * b->width + first % b->width, part, to);
    }
    if (end < b->rows * b->width) return status;
    tt__free(b->file->ctx, b->scale); /* the whole parameter has been read */
    b->scale = NULL;
    return status;
}

static void tt__bnb_drop(tt_context *ctx, void *source)
{
    tt__bnb *b = (tt__bnb *)source;
    tt_safetensors_close(b->file);
    tt__free(ctx, b->scale);
    tt__free(ctx, b);
}

/* A section of a coded matrix whose bytes are a tensor of the file: the codes, the scales or the nested
   scales. at: offset in the matrix; bytes: those of `unit` rows, which stay together in the file. */
typedef struct tt__bnb_section { size_t at, bytes; } tt__bnb_section;

/* Sets the sections of a coded matrix and returns their number. */
static int tt__bnb_sections(tt_dtype dtype, const tt__packing *order, int64_t rows, int64_t width,
                            tt__bnb_section section[3])
{
    const tt__coded_parts parts = tt__coded_parts_of(dtype, rows, width);
    const int64_t unit = tt__bnb_unit(order, rows), n = unit * width, blocks = n / TT__NF4_BLOCK;
    const bool bytes = dtype == TT__INT8;
    const tt__bnb_section all[] = {
        {0, (size_t)(bytes ? n : n / 2)},
        {(size_t)parts.scales, (size_t)(bytes ? unit * (int64_t)sizeof(float) : blocks)},
        {(size_t)parts.nested, (size_t)tt__ceil_div(blocks, TT__NF4_NESTED) * sizeof(float)}};
    memcpy(section, all, sizeof all);
    return bytes ? 2 : 3;
}

/* Reads bytes [first, first + n) of the weight as a coded matrix of b->dtype (tt_param.read_codes). */
static tt_status tt__bnb_read_codes(void *source, size_t first, size_t n, void *to)
{
    const tt__bnb *b = (const tt__bnb *)source;
    const size_t tail_at = (size_t)tt__coded_parts_of(b->dtype, b->rows, b->width).offset;
    const int tensor[] = {b->codes, b->scales, b->nested};
    const int64_t unit = tt__bnb_unit(&b->order, b->rows), units = b->rows / unit;
    tt__bnb_section section[3];
    const int sections = tt__bnb_sections(b->dtype, &b->order, b->rows, b->width, section);
    tt_status status = TT_OK;
    memset(to, 0, n);
    for (int s = 0; s < sections; s++)
        for (int64_t k = 0; k < units && status == TT_OK; k++) {
            const size_t size = section[s].bytes, at = section[s].at + (size_t)k * size;
            const size_t begin = at > first ? at : first, end = at + size < first + n ? at + size : first + n;
            const int64_t row = b->order.kind == 'g' ? tt__packing_row(&b->order, k * unit, false) : 0;
            if (begin < end)
                status = tt_safetensors_read(b->file, tensor[s], (size_t)(row / unit) * size + begin - at,
                                             end - begin, (char *)to + (begin - first));
        }
    if (b->dtype != TT__NF4 || status != TT_OK || first + n <= tail_at) return status;
    float tail[257]; /* the offset and the map */
    const size_t begin = first > tail_at ? first : tail_at;
    tail[0] = b->offset;
    status = tt_safetensors_read(b->file, b->map, 0, 256 * sizeof *tail, tail + 1);
    memcpy((char *)to + (begin - first), (const char *)tail + (begin - tail_at), first + n - begin);
    return status;
}

/* Makes the quantised weight b, which was opened, the source of parameter p. If p may be a coded matrix of
   b->dtype (linear), the codes and the scales stay as they are, and p is frozen; otherwise the parameter gets
   the values as floats. Fails if a scale is not finite. */
static tt_status tt__param_from_bnb(tt_param *p, const tt__bnb *b, bool linear)
{
    const char *const weight = b->file->infos[b->codes].name;
    const int floats[] = {b->nested < 0 ? b->scales : b->nested, b->map};
    for (int k = 0; k < TT__COUNT(floats); k++) {
        if (floats[k] < 0) continue;
        tt_status status = tt__check_scales(b->file, floats[k], weight, TT_ROUND_NONE);
        if (status != TT_OK) return status;
    }
    for (int k = 0; k < TT__COUNT(b->numbers); k++)
        if (!isfinite(b->numbers[k]))
            return tt__fail(p->ctx, TT_ERR_FORMAT, "'%s': element %d of tensor '%s.quant_map' is not finite: "
                            "save the model again, or copy the file again", b->file->path, k, weight);
    tt__bnb *own = (tt__bnb *)tt__alloc(p->ctx, sizeof *own);
    if (!own) return TT_ERR_MEMORY;
    *own = *b;
    own->file->shared++;
    tt__param_drop_source(p);
    p->source = own;
    p->read = tt__bnb_read;
    p->release = tt__bnb_drop;
    if (!linear || b->dtype == TT_F32) return TT_OK;
    tt_status status = tt_param_store(p, tt_dtype_name(b->dtype));
    if (status != TT_OK) return status;
    p->read_codes = tt__bnb_read_codes;
    p->frozen = true;
    return TT_OK;
}

/* ---- saving */

enum { TT__BNB_TENSORS = 6, TT__BNB_STATE_BYTES = 256 }; /* max number of tensors of a weight; bytes of the
                                                            JSON text, with spaces at the end */

/* Returns the format of a model's coded matrices in files, that of the first coded matrix of the layers;
   TT_F32: the layers have none, or of a format that bitsandbytes lacks. */
static tt_dtype tt__bnb_form(const tt__layout *l)
{
    const tt__tensor_row *row;
    char name[256];
    for (int k = l->a->n_model; (row = tt__layout_row(l, k, name)) != NULL; k++) {
        const tt_param *p = *tt__layout_slot(l, row, k);
        if (p && (p->form == TT__INT8 || p->form == TT__NF4)) return p->form;
    }
    return TT_F32;
}

/* Returns the dtype of the coded matrix as which parameter p is saved in bitsandbytes' layout; TT_F32: p is
   saved as floats. form: the format of the whole file. order: the order of the file's rows. */
static tt_dtype tt__bnb_saved(const tt_param *p, tt_dtype form, const tt__packing *order)
{
    const int64_t rows = p->dims[0], unit = tt__bnb_unit(order, rows), n = unit * (p->size / rows);
    if (p->ndim != 2 || p->form != form || (form != TT__INT8 && form != TT__NF4)) return TT_F32;
    return form == TT__NF4 && unit < rows && n % (TT__NF4_BLOCK * TT__NF4_NESTED) ? TT_F32 : form;
}

/* Describes the tensors of coded parameter p in files. name: the name of the weight. names: room for
   TT__BNB_TENSORS names. Returns the number of tensors. */
static int tt__bnb_infos(const tt_param *p, const char *name, tt_tensor_info *info, char (*names)[256])
{
    static const struct { const char *end, *dtype; } rows[] = {
        {"weight", "I8"}, {"SCB", "F32"}, {"weight_format", "U8"}};
    static const struct { const char *end, *dtype; } blocks[] = {
        {"weight", "U8"}, {"weight.absmax", "U8"}, {"weight.nested_absmax", "F32"},
        {"weight.nested_quant_map", "F32"}, {"weight.quant_map", "F32"},
        {"weight" TT__BNB_STATE "nf4", "U8"}};
    const bool bytes = p->form == TT__INT8;
    const int64_t scales = p->size / TT__NF4_BLOCK;
    const int64_t counts[] = {p->size / 2, scales, tt__ceil_div(scales, TT__NF4_NESTED), 256, 16,
                              TT__BNB_STATE_BYTES};
    const int n = bytes ? TT__COUNT(rows) : TT__COUNT(blocks);
    for (int k = 0; k < n; k++) {
        snprintf(names[k], sizeof *names, "%.*s%s", (int)(strlen(name) - strlen("weight")), name,
                 bytes ? rows[k].end : blocks[k].end);
        info[k].name = names[k];
        info[k].dtype = bytes ? rows[k].dtype : blocks[k].dtype;
        info[k].ndim = bytes ? 2 - k : k ? 1 : 2;
        info[k].dims[0] = bytes ? p->dims[0] : counts[k];
        info[k].dims[1] = bytes ? p->size / p->dims[0] : 1;
    }
    return n;
}

/* Prints the JSON text of a weight of NF4, padded to TT__BNB_STATE_BYTES. */
static void tt__bnb_print_state(const tt_param *p, float offset, char to[TT__BNB_STATE_BYTES + 1])
{
    char number[32];
    const int n = snprintf(to, TT__BNB_STATE_BYTES + 1, "{\"quant_type\": \"nf4\", \"blocksize\": %d, "
                           "\"dtype\": \"float32\", \"shape\": [%lld, %lld], \"nested_blocksize\": %d, "
                           "\"nested_dtype\": \"float32\", \"nested_offset\": %s}", (int)TT__NF4_BLOCK,
                           (long long)p->dims[0], (long long)p->dims[1], (int)TT__NF4_NESTED,
                           tt__shortest(offset, number));
    memset(to + n, ' ', (size_t)(TT__BNB_STATE_BYTES - n));
}

/* Copies the coded matrix of parameter p to `to`: from the memory of p's program, from p's file, or coded
   anew from p's source. */
static tt_status tt__bnb_codes_of(const tt_param *p, uint8_t *to)
{
    const int64_t cols = p->size / p->dims[0];
    const size_t bytes = tt__matrix_bytes(p->form, p->dims[0], cols);
    union { const tt_param *p; void *from; } codes = {p};
    if (tt__has_memory(p)) return tt__param_read_codes(codes.from, 0, bytes, to);
    if (p->read_codes) return p->read_codes(p->source, 0, bytes, to);
    float *row = (float *)tt__alloc(p->ctx, sizeof *row * (size_t)(cols + 4));
    float *absmax = (float *)tt__alloc(p->ctx, sizeof *absmax * (size_t)(p->size / TT__NF4_BLOCK + 1));
    tt_status status = row && absmax ? TT_OK : TT_ERR_MEMORY;
    memset(to, 0, bytes);
    if (status == TT_OK) status = tt__encode_param(p, tt__param_read_source, NULL, to, row, absmax);
    tt__free(p->ctx, row);
    tt__free(p->ctx, absmax);
    return status;
}

/* Writes the tensors of coded parameter p, in the order of tt__bnb_infos. */
static tt_status tt__bnb_write(tt_safetensors_writer *w, const tt_param *p, const tt__packing *order)
{
    const int64_t cols = p->size / p->dims[0], unit = tt__bnb_unit(order, p->dims[0]);
    const tt__coded_parts parts = tt__coded_parts_of(p->form, p->dims[0], cols);
    tt__bnb_section section[3];
    const int sections = tt__bnb_sections(p->form, order, p->dims[0], cols, section);
    uint8_t *codes = (uint8_t *)tt__alloc(p->ctx, (size_t)parts.bytes);
    tt_status status = codes ? tt__bnb_codes_of(p, codes) : TT_ERR_MEMORY;
    for (int s = 0; s < sections; s++)
        for (int64_t k = 0; k < p->dims[0] / unit && status == TT_OK; k++) {
            const int64_t row = order->kind == 'g' ? tt__packing_row(order, k * unit, true) : 0;
            const size_t at = section[s].at + (size_t)(row / unit) * section[s].bytes;
            status = tt_safetensors_write(w, codes + at, section[s].bytes);
        }
    if (p->form == TT__INT8) {
        const uint8_t by_rows = 0;
        if (status == TT_OK) status = tt_safetensors_write(w, &by_rows, 1);
    } else if (status == TT_OK) {
        char state[TT__BNB_STATE_BYTES + 1];
        float offset;
        memcpy(&offset, codes + parts.offset, sizeof offset);
        tt__bnb_print_state(p, offset, state);
        status = tt_safetensors_write(w, codes + parts.map, 256 * sizeof(float));
        if (status == TT_OK) status = tt_safetensors_write(w, tt__nf4_numbers, sizeof tt__nf4_numbers);
        if (status == TT_OK) status = tt_safetensors_write(w, state, TT__BNB_STATE_BYTES);
    }
    tt__free(p->ctx, codes);
    return status;
}
