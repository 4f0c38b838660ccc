#pragma once
#include "../base/base.h"
#include "../base/codes.h"
#include "../tape/tape.h"
#include "cpu.h"
#include "devices.h"

/* ---------------------------------------------------------------------------------- coded matrices in memory
   Reads and writes the parameters that tt_param_store has made coded matrices. Each rank has the whole
   matrix. */

/* Reads bytes [first, first + n) of a coded matrix. */
typedef tt_status (*tt__codes_fn)(void *from, size_t first, size_t n, void *to);

/* Reads the codes and scales of elements [first, first + n) of a coded matrix (rows, cols) and converts them
   to floats. */
static tt_status tt__read_coded(tt__codes_fn read, void *from, tt_dtype dtype, int64_t rows, int64_t cols,
                                int64_t first, int64_t n, float *to)
{
    enum { PIECE = 16384 }; /* elements that are read at a time: NF4's elements with one nested scale */
    const tt__coded_parts p = tt__coded_parts_of(dtype, rows, cols);
    const int64_t bits = dtype == TT__INT8 ? 8 : 4, item = dtype == TT__INT8 ? 4 : dtype == TT__NF4 ? 1 : 2;
    uint8_t codes[PIECE], scales[PIECE / 16];
    float nested[1], map[256];
    tt__codes c = tt__codes_like(dtype, PIECE);
    tt_status status = TT_OK;
    c.codes = codes;
    c.scales = scales;
    c.nested = nested;
    c.map = map;
    if (dtype == TT__NF4) {
        status = read(from, (size_t)p.offset, sizeof c.offset, &c.offset);
        if (status == TT_OK) status = read(from, (size_t)p.map, sizeof map, map);
    }
    for (int64_t at = first, m; at < first + n && status == TT_OK; at += m) {
        /* base: the element before `at` from which scales are counted. An element of INT8 has the scale of
           its row, whose codes need not be read. */
        const int64_t base = dtype == TT__INT8 ? at : at / PIECE * PIECE;
        const int64_t room = dtype == TT__INT8 ? tt__min(PIECE, cols - at % cols) : base + PIECE - at;
        m = tt__min(first + n - at, room);
        const int64_t block = dtype == TT__INT8 ? cols : c.block, end = at + m;
        const int64_t from_code = base * bits / 8, end_code = tt__ceil_div(end * bits, 8);
        const int64_t from_scale = base / block, end_scale = tt__ceil_div(end, block);
        status = read(from, (size_t)from_code, (size_t)(end_code - from_code), codes);
        if (status == TT_OK)
            status = read(from, (size_t)(p.scales + from_scale * item),
                          (size_t)((end_scale - from_scale) * item), scales);
        if (status == TT_OK && dtype == TT__NF4)
            status = read(from, (size_t)(p.nested + base / PIECE * 4), sizeof *nested, nested);
        if (status == TT_OK) tt__widen_codes(to + (at - first), &c, at - base, m);
    }
    return status;
}

/* Reads floats [first, first + n) of a matrix that is to be coded; `first` must be a multiple of 4. */
typedef tt_status (*tt__floats_fn)(const tt_param *p, int64_t first, int64_t n, float *to);

/* Codes parameter p as dtype p->form into `to`. row: room for 4 floats more than a row has; absmax: for the
   scale of each block of NF4. */
static tt_status tt__encode_param(const tt_param *p, tt__floats_fn read, const float *values, uint8_t *to,
                                  float *row, float *absmax)
{
    const int64_t rows = p->dims[0], cols = p->size / rows;
    const tt__coding c = {p->form, rows, cols, to, absmax};
    tt_status status = TT_OK;
    for (int64_t r = 0; r < rows && status == TT_OK; r++) {
        const int64_t before = r * cols % 4;
        const float *x = values ? values + r * cols : row + before;
        if (!values) status = read(p, r * cols - before, cols + before, row);
        if (status == TT_OK && !tt__encode_row(&c, r, x))
            status = tt__fail(p->ctx, TT_ERR_NUMERIC, "parameter '%s': row %lld has a number that is not "
                              "finite or is too large for %s: correct the file, or store the parameter as "
                              "floats", p->name, (long long)r, tt_dtype_name(p->form));
    }
    if (status == TT_OK) tt__encode_end(&c);
    return status;
}

/* Writes parameter p, which is a coded matrix, to *x. The floats are `values` or, if that is NULL, those that
   `read` gives. `values` are coded first, so that an error leaves *x as it was; other codes are written in
   place if *x is the host's memory. */
static tt_status tt__write_coded(const tt_param *p, tt__floats_fn read, const float *values,
                                 const tt__memory *x)
{
    tt_context *ctx = p->ctx;
    const int64_t cols = p->size / p->dims[0], blocks = p->form == TT__NF4 ? p->size / TT__NF4_BLOCK : 0;
    const bool in_place = !values && (x->arena->kind->host || x->space == TT__HOST);
    const size_t bytes = tt__matrix_bytes(p->form, p->dims[0], cols);
    uint8_t *codes = in_place ? (uint8_t *)x->data : (uint8_t *)tt__calloc(ctx, bytes);
    float *row = (float *)tt__alloc(ctx, sizeof *row * (size_t)(cols + 4));
    float *absmax = (float *)tt__alloc(ctx, sizeof *absmax * (size_t)(blocks + 1));
    tt_status status = codes && row && absmax ? TT_OK : TT_ERR_MEMORY;
    if (in_place) memset(codes, 0, bytes);
    if (status == TT_OK) status = tt__encode_param(p, read, values, codes, row, absmax);
    tt__memory at = *x;
    at.dtype = TT_U8;
    if (status == TT_OK && !in_place) status = tt__write_memory(&at, codes, TT_U8, bytes);
    if (!in_place) tt__free(ctx, codes);
    tt__free(ctx, row);
    tt__free(ctx, absmax);
    return status;
}

/* A copy of a coded matrix in the host's memory, whose bytes follow this struct: a parameter's source. */
typedef struct tt__own_codes {
    tt_dtype dtype;
    int64_t rows, cols;
} tt__own_codes;

static tt_status tt__read_own_codes(void *source, size_t first, size_t n, void *to)
{
    memcpy(to, (const uint8_t *)((const tt__own_codes *)source + 1) + first, n);
    return TT_OK;
}

static tt_status tt__read_own_values(void *source, int64_t first, int64_t n, float *to)
{
    const tt__own_codes *c = (const tt__own_codes *)source;
    return tt__read_coded(tt__read_own_codes, source, c->dtype, c->rows, c->cols, first, n, to);
}

/* Copies the bytes of a coded matrix that `read` gives to *x. */
static tt_status tt__copy_codes(tt__codes_fn read, void *from, size_t bytes, const tt__memory *x)
{
    uint8_t piece[TT__PIECE];
    tt_status status = TT_OK;
    for (size_t at = 0, n; at < bytes && status == TT_OK; at += n) {
        const tt__memory to = {x->arena, x->rank, x->space, TT_U8, (char *)x->data + at};
        n = bytes - at < sizeof piece ? bytes - at : sizeof piece;
        status = read(from, at, n, piece);
        if (status == TT_OK) status = tt__write_memory(&to, piece, TT_U8, n);
    }
    return status;
}
