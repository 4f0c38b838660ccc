#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../ops/casts/rules.h"
#include "../context/cpu.h"
#include "../context/params.h"
#include "../files/safetensors.h"

/* ---- weights in few bits, in files
   A weight (rows, columns) that tt_param_round rounds is saved as a packed tensor and a tensor of scales,
   whose name is that of the weight and "_scale":
   ternary: U8 (rows / 4, columns), as transformers' BitNet has it: bits 2 k and 2 k + 1 of a number in row r
       are 1 plus the value in row `k * (rows / 4) + r`. The scale (1) is the divisor of the values.
   int8: I8 (rows, columns). The scales (rows, 1) are the factors of the rows.
   binary: U8 (rows, columns / 8): bit k of number c of a row is 1 if the value in column 8 c + k is positive.
       The scales (rows, 1) are the factors of the rows.
   Quotients are rounded up. Only weights that products read are packed; see tt__saved_as. */

/* Sets the shape of the packed tensor and of its scales. Returns the dtype of the packed tensor. */
static const char *tt__packed_dims(tt_rounding kind, int64_t rows, int64_t cols, tt_tensor_info *weight,
                                   tt_tensor_info *scale)
{
    const bool ternary = kind == TT_ROUND_TERNARY;
    weight->ndim = 2;
    weight->dims[0] = ternary ? tt__ceil_div(rows, 4) : rows;
    weight->dims[1] = kind == TT_ROUND_BINARY ? tt__ceil_div(cols, 8) : cols;
    scale->ndim = ternary ? 1 : 2;
    scale->dims[0] = ternary ? 1 : rows;
    scale->dims[1] = 1;
    return kind == TT_ROUND_INT8 ? "I8" : "U8";
}

/* Returns how the tensor `index` of a file is packed, which must be a weight (rows, cols), and sets *scale to
   the index of its scales. Returns TT_ROUND_NONE if the tensor is not packed. */
static tt_rounding tt__packed_as(const tt_safetensors *s, int index, int64_t rows, int64_t cols, int *scale)
{
    char name[300];
    snprintf(name, sizeof name, "%.250s_scale", s->infos[index].name);
    *scale = tt_safetensors_find(s, name);
    for (int k = TT_ROUND_NONE + 1; k <= TT_ROUND_BINARY && *scale >= 0; k++) {
        tt_tensor_info weight, scales;
        const char *dtype = tt__packed_dims((tt_rounding)k, rows, cols, &weight, &scales);
        const tt_tensor_info *w = &s->infos[index], *f = &s->infos[*scale];
        bool same = w->ndim == 2 && strcmp(w->dtype, dtype) == 0 && f->ndim == scales.ndim;
        for (int d = 0; d < 2 && same; d++)
            same = w->dims[d] == weight.dims[d] && (d >= f->ndim || f->dims[d] == scales.dims[d]);
        if (same) return (tt_rounding)k;
    }
    return TT_ROUND_NONE;
}

/* Fails unless tensor `index` of a file, the scales of tensor `weight`, has floats that give finite values.
   kind: how the weight is packed; TT_ROUND_NONE: values are at most as large as the scales. */
static tt_status tt__check_scales(const tt_safetensors *s, int index, const char *weight, tt_rounding kind)
{
    const tt_tensor_info *info = &s->infos[index];
    float some[256];
    int64_t n = 1;
    tt_status status = TT_OK;
    if (tt__safetensors_type(info->dtype) > TT__ST_F64)
        return tt__fail(s->ctx, TT_ERR_FORMAT, "'%s': tensor '%s' has dtype %s, but the scales of '%s' must "
                        "be F32, BF16, F16 or F64: save the model again, or copy the file again", s->path,
                        info->name, info->dtype, weight);
    for (int k = 0; k < info->ndim; k++) n *= info->dims[k]; /* the file's size bounds the product */
    for (int64_t first = 0, m; first < n && status == TT_OK; first += m) {
        m = tt__min(n - first, (int64_t)TT__COUNT(some));
        status = tt_safetensors_read_f32(s, index, first, m, some);
        for (int64_t k = 0; k < m && status == TT_OK; k++) {
            const float x = some[k];
            const float value = kind == TT_ROUND_TERNARY ? 1 / x : kind == TT_ROUND_INT8 ? 127 * x : x;
            if (!isfinite(x) || !isfinite(value))
                status = tt__fail(s->ctx, TT_ERR_FORMAT, "'%s': element %lld of tensor '%s' is %g, which "
                                  "makes values of '%s' infinite or no numbers: save the model again, or "
                                  "copy the file again", s->path, (long long)(first + k), info->name,
                                  (double)x, weight);
        }
    }
    return status;
}

/* Reads elements [first, first + n) of a packed weight (rows, cols). */
static tt_status tt__packed_read(tt_safetensors *s, int index, int scale, tt_rounding kind, int64_t rows,
                                 int64_t cols, int64_t first, int64_t n, float *to)
{
    uint8_t bytes[1024];
    const int64_t quarter = tt__ceil_div(rows, 4), wide = tt__ceil_div(cols, 8);
    tt_status status = TT_OK;
    for (int64_t end = first + n, m; first < end && status == TT_OK; first += m, to += m) {
        const int64_t r = first / cols, c = first % cols;
        const int64_t at = kind == TT_ROUND_INT8 ? first : kind == TT_ROUND_TERNARY ? r % quarter * cols + c
                                                                                    : r * wide + c / 8;
        float factor;
        m = tt__min(tt__min(end - first, cols - c), (int64_t)sizeof bytes);
        const int64_t of_m = kind == TT_ROUND_BINARY ? (c + m - 1) / 8 - c / 8 + 1 : m;
        status = tt_safetensors_read(s, index, (size_t)at, (size_t)of_m, bytes);
        if (status == TT_OK)
            status = tt_safetensors_read_f32(s, scale, kind == TT_ROUND_TERNARY ? 0 : r, 1, &factor);
        for (int64_t k = 0; k < m && status == TT_OK; k++) {
            if (kind == TT_ROUND_INT8) to[k] = (float)(int8_t)bytes[k] * factor;
            else if (kind == TT_ROUND_TERNARY)
                to[k] = (float)((bytes[k] >> (2 * (r / quarter)) & 3) - 1) * (1 / factor);
            else to[k] = bytes[(c + k) / 8 - c / 8] >> ((c + k) % 8) & 1 ? factor : -factor;
        }
    }
    return status;
}

/* Rounds a weight (rows, cols): sets w to the numbers of steps, and step to the step of each row. For int8
   both are those of ROUND (src/ops/casts). For ternary and binary the sums have another order: steps differ
   by a few units in the last place, and a weight halfway between two numbers may get the other one. */
static void tt__round_matrix(tt_rounding kind, int64_t rows, int64_t cols, float *w, float *step)
{
    double all = 0;
    for (int round = 0; round < 2; round++) /* the first round finds the mean of the matrix */
        for (int64_t r = 0; r < rows; r++) {
            double sum = 0, max = 0;
            float *row = w + r * cols;
            for (int64_t c = 0; c < cols; c++) {
                sum += fabs((double)row[c]);
                max = fmax(max, fabs((double)row[c]));
            }
            all += round ? 0 : sum / (double)rows;
            if (!round) continue;
            const double measure = kind == TT_ROUND_INT8 ? max : kind == TT_ROUND_TERNARY ? all : sum;
            const tt__few_bits s = tt__few_bits_of(kind, measure, cols);
            const float most = kind == TT_ROUND_INT8 ? 127 : 1;
            step[r] = s.step;
            for (int64_t c = 0; c < cols; c++)
                row[c] = kind == TT_ROUND_BINARY ? (row[c] < 0 ? -1.0f : 1.0f)
                                                 : fminf(fmaxf(rintf(row[c] * s.many), -most), most);
        }
}

/* Packs the numbers of steps of a weight (rows, cols) in place of w. Returns the bytes of the packed tensor,
   which are fewer than those of w. */
static size_t tt__pack_matrix(tt_rounding kind, int64_t rows, int64_t cols, float *w)
{
    tt_tensor_info weight, scale;
    tt__packed_dims(kind, rows, cols, &weight, &scale);
    const int64_t n = weight.dims[0] * weight.dims[1], quarter = weight.dims[0];
    uint8_t *to = (uint8_t *)(void *)w;
    if (kind == TT_ROUND_TERNARY) /* first all numbers of two bits, each in the first byte of its float */
        for (int64_t k = 0; k < rows * cols; k++) to[4 * k] = (uint8_t)(int)(w[k] + 1);
    for (int64_t k = 0; k < n; k++) { /* byte k comes from floats at byte k or after it */
        int byte = 0;
        if (kind == TT_ROUND_INT8) byte = (int)w[k] & 255;
        for (int64_t j = 0; j < 4 && kind == TT_ROUND_TERNARY; j++) {
            const int64_t r = j * quarter + k / cols;
            if (r < rows) byte |= to[4 * (r * cols + k % cols)] << (2 * j);
        }
        for (int64_t j = 0; j < 8 && kind == TT_ROUND_BINARY; j++) {
            const int64_t c = k % weight.dims[1] * 8 + j;
            if (c < cols) byte |= (w[k / weight.dims[1] * cols + c] > 0) << j;
        }
        to[k] = (uint8_t)byte;
    }
    return (size_t)n;
}

/* Reads a whole parameter into w, and rounds it. step: the step of each row. Fails if a number is not
   finite. */
static tt_status tt__read_rounded(const tt_param *p, float *w, float *step)
{
    tt_status status = TT_OK;
    for (int64_t first = 0; first < p->size && status == TT_OK; first += TT__PIECE)
        status = tt__param_read(p, first, tt__min(TT__PIECE, p->size - first), w + first);
    for (int64_t k = 0; k < p->size && status == TT_OK; k++)
        if (!isfinite(w[k]))
            status = tt__fail(p->ctx, TT_ERR_NUMERIC, "parameter '%s': element %lld is not finite, so its "
                              "row cannot be saved rounded (tt_param_round): load an earlier state",
                              p->name, (long long)k);
    if (status == TT_OK) tt__round_matrix(p->rounding, p->dims[0], p->dims[1], w, step);
    return status;
}

/* Writes a rounded parameter: the packed tensor, then the tensor of scales. */
static tt_status tt__save_packed(tt_safetensors_writer *w, const tt_param *p)
{
    tt_context *ctx = p->ctx;
    float *all = (float *)tt__alloc(ctx, sizeof *all * (size_t)(p->size + p->dims[0]));
    float *step = all ? all + p->size : NULL;
    tt_status status = all ? tt__read_rounded(p, all, step) : TT_ERR_MEMORY;
    const bool ternary = p->rounding == TT_ROUND_TERNARY;
    if (status == TT_OK) {
        const size_t bytes = tt__pack_matrix(p->rounding, p->dims[0], p->dims[1], all);
        status = tt_safetensors_write(w, all, bytes);
    }
    if (ternary && all) *step = 1 / *step;
    const size_t scales = ternary ? 1 : (size_t)p->dims[0];
    if (status == TT_OK) status = tt_safetensors_write(w, step, sizeof *step * scales);
    tt__free(ctx, all);
    return status;
}
