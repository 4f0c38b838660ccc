#pragma once
#include "../base/base.h"
#include "lists.h"
#include "utf8.h"
#include "json.h"

/* ------------------------------------------------------------------------------------------- safetensors */

/* A safetensors file has three parts. The first is the length of the header in bytes, a little-endian uint64.
   The second is the header, a JSON object with a member for each tensor, name: {dtype, shape, data_offsets},
   and a member "__metadata__", an object of strings. data_offsets is [begin, end) in bytes of the third part,
   which has the tensors without gaps. */
#define TT__SAFETENSORS_HEADER 100000000u /* max bytes of a header, the format's limit */

static const struct { const char *name; int bits; } tt__safetensors_types[] = {
    {"F32", 32}, {"BF16", 16}, {"F16", 16}, {"F64", 64}, {"I64", 64}, {"I32", 32}, {"I16", 16}, {"I8", 8},
    {"U8", 8}, {"BOOL", 8}, {"U16", 16}, {"U32", 32}, {"U64", 64}, {"C64", 64}, {"F8_E4M3", 8},
    {"F8_E5M2", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"F6_E2M3", 6}, {"F6_E3M2", 6},
    {"F4", 4},
};
/* Indices of the first rows of tt__safetensors_types, whose types can be read as float or int32. */
enum {
    TT__ST_F32, TT__ST_BF16, TT__ST_F16, TT__ST_F64, TT__ST_I64, TT__ST_I32, TT__ST_I16, TT__ST_I8, TT__ST_U8,
    TT__ST_BOOL, TT__ST_U16, TT__ST_U32, TT__ST_U64
};

static int tt__safetensors_type(const char *name)
{
    for (int i = 0; name && i < TT__COUNT(tt__safetensors_types); i++)
        if (strcmp(tt__safetensors_types[i].name, name) == 0) return i;
    return -1;
}

/* Computes the bytes of a tensor. Returns false if the number of bytes is too large for size_t or not
   whole. */
static bool tt__safetensors_size(const tt_tensor_info *info, int type, size_t *bytes)
{
    size_t bits, elements = 1;
    for (int d = 0; d < info->ndim; d++)
        if ((uint64_t)info->dims[d] > SIZE_MAX || !tt__mul_size(elements, (size_t)info->dims[d], &elements))
            return false;
    if (!tt__mul_size(elements, (size_t)tt__safetensors_types[type].bits, &bits) || bits % 8) return false;
    *bytes = bits / 8;
    return true;
}

struct tt_safetensors {
    tt_context *ctx;
    int shared;      /* number of further owners, each of which calls tt_safetensors_close */
    char *path;
    void *file;      /* the open file */
    size_t size;     /* bytes of the file at its opening */
    tt__json json;   /* the parsed header, which holds the names and the metadata */
    size_t data;     /* offset of the first tensor in the file */
    int count;
    tt_tensor_info *infos;
    size_t *begin;   /* for each tensor: offset of its first byte from `data` */
    int *nodes;      /* for each tensor: its node in `json`, for errors */
    uint32_t *order; /* indices of the tensors, sorted by offset, while the file is checked */
};

void tt_safetensors_close(tt_safetensors *s)
{
    if (!s || s->shared-- > 0) return;
    tt_context *ctx = s->ctx;
    if (s->file) ctx->options.files.close(ctx->options.files.user, s->file);
    if (s->json.ctx) tt__json_free(&s->json);
    void *const owned[] = {s->path, s->infos, s->begin, s->nodes, s->order, s};
    tt__free_all(ctx, owned, TT__COUNT(owned));
}

static bool tt__safetensors_before(const void *arg, uint32_t a, uint32_t b)
{
    const tt_safetensors *s = (const tt_safetensors *)arg;
    if (s->begin[a] != s->begin[b]) return s->begin[a] < s->begin[b];
    /* Empty tensors come before a tensor that is not empty and has the same offset. */
    if (s->infos[a].bytes != s->infos[b].bytes) return s->infos[a].bytes < s->infos[b].bytes;
    return a < b;
}

TT_PRINTF(4, 5)
static tt_status tt__safetensors_fail(const tt_safetensors *s, const char *name, int node, const char *format,
                                      ...)
{
    char what[512];
    va_list args;
    va_start(args, format);
    vsnprintf(what, sizeof what, format, args);
    va_end(args);
    return tt__fail(s->ctx, TT_ERR_FORMAT, "'%s', byte %zu: tensor '%.200s' %s: save or copy the file again",
                    s->path, s->json.base + s->json.nodes[node].offset, name, what);
}

/* Reads and checks the header's description of a tensor. */
static tt_status tt__safetensors_tensor(tt_safetensors *s, int index, int node, size_t data_bytes)
{
    const tt__json *j = &s->json;
    tt_tensor_info *info = &s->infos[index];
    const char *name = j->pool + j->nodes[node].key;
    int dtype = tt__json_get(j, node, "dtype"), shape = tt__json_get(j, node, "shape");
    int offsets = tt__json_get(j, node, "data_offsets");

    if (strlen(name) != j->nodes[node].key_bytes)
        return tt__safetensors_fail(s, name, node, "has a NUL byte in its name, which is not allowed");
    if (j->nodes[node].kind != TT__JSON_OBJECT)
        return tt__safetensors_fail(s, name, node, "is %s; expected an object", tt__json_kind_name(j, node));
    const char *missing = dtype < 0 ? "dtype" : shape < 0 ? "shape" : offsets < 0 ? "data_offsets" : NULL;
    if (missing) return tt__safetensors_fail(s, name, node, "has no \"%s\"", missing);
    const char *type_name = tt__json_text(j, dtype);
    int type = tt__safetensors_type(type_name);
    if (type < 0)
        return tt__safetensors_fail(s, name, dtype, "has the dtype %.40s, which safetensors does not define",
                                    type_name ? type_name : tt__json_kind_name(j, dtype));
    if (j->nodes[shape].kind != TT__JSON_ARRAY)
        return tt__safetensors_fail(s, name, shape, "has %s as \"shape\"; expected an array",
                                    tt__json_kind_name(j, shape));
    info->name = name;
    info->dtype = tt__safetensors_types[type].name;
    info->ndim = j->nodes[shape].count;
    if (info->ndim > TT__COUNT(info->dims))
        return tt__safetensors_fail(s, name, shape, "has %d dimensions, but at most %d are possible",
                                    info->ndim, TT__COUNT(info->dims));
    for (int d = 0; d < info->ndim; d++) {
        const tt__json_node *dim = &j->nodes[shape + 1 + d];
        if (!dim->exact || dim->integer < 0)
            return tt__safetensors_fail(s, name, shape + 1 + d,
                                        "has a dimension that is not an integer >= 0");
        info->dims[d] = dim->integer;
    }
    if (!tt__safetensors_size(info, type, &info->bytes))
        return tt__safetensors_fail(s, name, shape, "has a shape whose size overflows or, for a dtype of "
                                    "less than a byte, is not a whole number of bytes");
    const tt__json_node *begin = &j->nodes[offsets + 1], *end = &j->nodes[offsets + 2];
    bool two = j->nodes[offsets].kind == TT__JSON_ARRAY && j->nodes[offsets].count == 2;
    if (!two || !begin->exact || !end->exact)
        return tt__safetensors_fail(s, name, offsets,
                                    "has \"data_offsets\" that are not an array of two integers");
    if (begin->integer < 0 || end->integer < begin->integer || (uint64_t)end->integer > data_bytes)
        return tt__safetensors_fail(s, name, offsets, "is in bytes [%lld, %lld) of the data, but the file "
                                    "has only %zu bytes of data; it may be truncated",
                                    (long long)begin->integer, (long long)end->integer, data_bytes);
    s->begin[index] = (size_t)begin->integer;
    size_t bytes = (size_t)(end->integer - begin->integer);
    if (bytes == info->bytes) return TT_OK;
    return tt__safetensors_fail(s, name, offsets,
                                "has %zu bytes of data, but its dtype %s and shape need %zu", bytes,
                                info->dtype, info->bytes);
}

/* Reads the length of the header, then the header. */
static tt_status tt__safetensors_read_header(tt_safetensors *s)
{
    tt_context *ctx = s->ctx;
    uint64_t length = 0;
    if (s->size < 8)
        return tt__fail(ctx, TT_ERR_FORMAT, "'%s' has %zu bytes, but a safetensors file starts with 8 bytes "
                        "that give the length of its header: is it a safetensors file?", s->path, s->size);
    tt_status status = tt__file_read(ctx, s->path, s->file, 0, &length, 8);
    if (status != TT_OK) return status;
    if (length > TT__SAFETENSORS_HEADER)
        return tt__fail(ctx, TT_ERR_FORMAT, "'%s', byte 0: the header has %llu bytes, but the format allows "
                        "%u: is it a safetensors file?", s->path, (unsigned long long)length,
                        TT__SAFETENSORS_HEADER);
    if (length > s->size - 8)
        return tt__fail(ctx, TT_ERR_FORMAT, "'%s', byte 0: the header has %llu bytes, but the file has only "
                        "%zu: it is truncated, or not a safetensors file", s->path,
                        (unsigned long long)length, s->size);
    s->data = 8 + (size_t)length;
    char *header = (char *)tt__alloc(ctx, (size_t)length + 1);
    status = header ? tt__file_read(ctx, s->path, s->file, 8, header, (size_t)length) : TT_ERR_MEMORY;
    if (status == TT_OK && (length < 2 || header[0] != '{'))
        status = tt__fail(ctx, TT_ERR_FORMAT, "'%s', byte 8: the header does not start with '{': is it a "
                          "safetensors file?", s->path);
    if (status == TT_OK) status = tt__json_parse(&s->json, ctx, s->path, 8, header, (size_t)length);
    tt__free(ctx, header);
    return status;
}

/* Reads the header and checks the descriptions of all tensors. */
static tt_status tt__safetensors_check(tt_safetensors *s)
{
    tt_context *ctx = s->ctx;
    tt_status status = tt__safetensors_read_header(s);
    if (status != TT_OK) return status;
    const tt__json *j = &s->json;
    size_t data_bytes = s->size - s->data, expected = 0;
    int members = j->nodes[0].count, metadata = tt__json_get(j, 0, "__metadata__");
    const uint8_t kind = metadata >= 0 ? j->nodes[metadata].kind : (uint8_t)TT__JSON_NULL;
    if (kind != TT__JSON_OBJECT && kind != TT__JSON_NULL)
        return tt__json_wrong(j, "__metadata__", metadata, NULL, "an object of strings");
    if (metadata >= 0)
        for (int i = 0, node = metadata + 1; i < j->nodes[metadata].count; i++, node = j->nodes[node].after)
            if (j->nodes[node].kind != TT__JSON_STRING)
                return tt__json_wrong(j, j->pool + j->nodes[node].key, node, NULL,
                                      "a string, as all in \"__metadata__\"");

    size_t n = (size_t)(members ? members : 1);
    if (!(s->infos = (tt_tensor_info *)tt__calloc(ctx, n * sizeof *s->infos)) ||
        !(s->begin = (size_t *)tt__calloc(ctx, n * sizeof *s->begin)) ||
        !(s->nodes = (int *)tt__calloc(ctx, n * sizeof *s->nodes)) ||
        !(s->order = (uint32_t *)tt__calloc(ctx, n * sizeof *s->order)))
        return TT_ERR_MEMORY;
    for (int i = 0, node = 1; i < members; i++, node = j->nodes[node].after) {
        s->json.nodes[node].number = node == metadata ? -1 : s->count;
        if (node == metadata) continue;
        status = tt__safetensors_tensor(s, s->count, node, data_bytes);
        if (status != TT_OK) return status;
        s->nodes[s->count] = node;
        s->order[s->count] = (uint32_t)s->count;
        s->count++;
    }
    tt__sort_indices(s->order, (size_t)s->count, tt__safetensors_before, s);
    for (int i = 0; i < s->count; i++) {
        int k = (int)s->order[i];
        if (s->begin[k] < expected)
            return tt__safetensors_fail(s, s->infos[k].name, s->nodes[k], "starts at byte %zu of the data, "
                                        "but overlaps '%.200s', which ends at %zu", s->begin[k],
                                        s->infos[s->order[i - 1]].name, expected);
        if (s->begin[k] > expected)
            return tt__safetensors_fail(s, s->infos[k].name, s->nodes[k], "starts at byte %zu of the data, "
                                        "but must start at %zu, where the tensor before it ends", s->begin[k],
                                        expected);
        expected = s->begin[k] + s->infos[k].bytes;
    }
    if (expected != data_bytes)
        return tt__fail(ctx, TT_ERR_FORMAT, "'%s', byte %zu: there are %zu bytes after the last tensor; "
                        "expected the end of the file: save or copy the file again", s->path,
                        s->data + expected, data_bytes - expected);
    tt__free(ctx, s->order);
    s->order = NULL;
    return TT_OK;
}

tt_safetensors *tt_safetensors_open(tt_context *ctx, const char *path)
{
    tt_safetensors *s = (tt_safetensors *)tt__calloc(ctx, sizeof *s);
    if (!s) return NULL;
    s->ctx = ctx;
    s->path = tt__strdup(ctx, path);
    if (!s->path || tt__file_begin(ctx, path, &s->file, &s->size) != TT_OK ||
        tt__safetensors_check(s) != TT_OK) {
        tt_safetensors_close(s);
        return NULL;
    }
    return s;
}

int tt_safetensors_count(const tt_safetensors *s) { return s->count; }

const tt_tensor_info *tt_safetensors_info(const tt_safetensors *s, int i)
{
    return i >= 0 && i < s->count ? &s->infos[i] : NULL;
}

int tt_safetensors_find(const tt_safetensors *s, const char *name)
{
    int node = tt__json_get(&s->json, 0, name);
    return node < 0 ? -1 : (int)s->json.nodes[node].number;
}

const char *tt_safetensors_metadata(const tt_safetensors *s, const char *key)
{
    return tt__json_text(&s->json, tt__json_get(&s->json, tt__json_get(&s->json, 0, "__metadata__"), key));
}

/* Fails unless tensor i exists and has the elements [first, first + n) or, if not `elements`, the bytes
   [first, first + n). */
static tt_status tt__safetensors_range(const tt_safetensors *s, int i, uint64_t first, uint64_t n,
                                       bool elements)
{
    if (i < 0 || i >= s->count)
        return tt__fail(s->ctx, TT_ERR_ARGUMENT,
                        "'%s' has no tensor number %d: it has %d tensors, numbered from 0", s->path, i,
                        s->count);
    const tt_tensor_info *info = &s->infos[i];
    uint64_t total = info->bytes;
    if (elements) total = total * 8 / (unsigned)tt__safetensors_types[tt__safetensors_type(info->dtype)].bits;
    if (first <= total && n <= total - first) return TT_OK;
    return tt__fail(s->ctx, TT_ERR_ARGUMENT,
                    "'%s': tensor '%.200s' has %llu %s, but the call asks for %lld from %lld on", s->path,
                    info->name, (unsigned long long)total, elements ? "elements" : "bytes", (long long)n,
                    (long long)first);
}

tt_status tt_safetensors_read(const tt_safetensors *s, int i, size_t first, size_t n, void *to)
{
    tt_status status = tt__safetensors_range(s, i, first, n, false);
    if (status != TT_OK) return status;
    return tt__file_read(s->ctx, s->path, s->file, (uint64_t)s->data + s->begin[i] + first, to, n);
}

/* Converts n numbers, of the type in row `type` of tt__safetensors_types, to float, up to the first number
   that a float cannot hold. Returns the number of converted numbers, and prints the number that does not fit
   to `found`. */
static int64_t tt__safetensors_floats(int type, const void *from, int64_t n, float *to, char found[32])
{
    const uint16_t *half = (const uint16_t *)from;
    for (int64_t k = 0; k < n && type == TT__ST_BF16; k++) to[k] = tt__from_bf16(half[k]);
    for (int64_t k = 0; k < n && type == TT__ST_F16; k++) to[k] = tt__from_f16(half[k]);
    for (int64_t k = 0; k < n && type == TT__ST_F64; k++) {
        double value = ((const double *)from)[k];
        if (isfinite(value) && fabs(value) > FLT_MAX) return snprintf(found, 32, "%g", value), k;
        to[k] = (float)value;
    }
    return n;
}

/* Converts n numbers, of the type in row `type` of tt__safetensors_types, to int32, up to the first number
   that an int32 cannot hold. Returns the number of converted numbers, and prints the number that does not fit
   to `found`. */
static int64_t tt__safetensors_integers(int type, const void *from, int64_t n, int32_t *to, char found[32])
{
    size_t width = (size_t)(tt__safetensors_types[type].bits / 8);
    uint64_t sign = (uint64_t)1 << (8 * width - 1);
    for (int64_t k = 0; k < n; k++) {
        uint64_t raw = 0;
        memcpy(&raw, (const char *)from + (size_t)k * width, width);
        bool negative = type <= TT__ST_I8 && (raw & sign);
        uint64_t magnitude = negative ? sign - (raw & (sign - 1)) : raw;
        if (magnitude > (uint64_t)INT32_MAX + (negative ? 1 : 0))
            return snprintf(found, 32, "%s%llu", negative ? "-" : "", (unsigned long long)magnitude), k;
        int64_t value = negative ? -(int64_t)magnitude : (int64_t)magnitude;
        to[k] = type == TT__ST_BOOL ? raw != 0 : (int32_t)value;
    }
    return n;
}

/* Reads elements [first, first + n) of tensor i and converts them to float or, if `integers`, to int32. Reads
   and converts some thousand bytes at a time. */
static tt_status tt__safetensors_elements(const tt_safetensors *s, int i, int64_t first, int64_t n,
                                          bool integers, void *to)
{
    tt_status status = tt__safetensors_range(s, i, (uint64_t)first, (uint64_t)n, true);
    if (status != TT_OK) return status;
    const tt_tensor_info *info = &s->infos[i];
    int type = tt__safetensors_type(info->dtype);
    size_t width = (size_t)(tt__safetensors_types[type].bits / 8);
    double piece[2048]; /* the elements as read; a double's alignment suits all types */
    char found[32];
    if (integers ? type < TT__ST_I64 || type > TT__ST_U64 : type > TT__ST_F64)
        return tt__fail(s->ctx, TT_ERR_UNSUPPORTED, "'%s': tensor '%.200s' is %s, which cannot be read as %s",
                        s->path, info->name, info->dtype,
                        integers ? "integers (BOOL, U8 to U64 and I8 to I64 can)"
                                 : "floats (F64, F32, BF16 and F16 can)");
    if (type == TT__ST_F32) return tt_safetensors_read(s, i, (size_t)first * 4, (size_t)n * 4, to);
    for (int64_t done = 0, part; done < n && status == TT_OK; done += part) {
        part = tt__min(n - done, (int64_t)(sizeof piece / width));
        status = tt_safetensors_read(s, i, (size_t)(first + done) * width, (size_t)part * width, piece);
        if (status != TT_OK) break;
        int64_t fit = integers ? tt__safetensors_integers(type, piece, part, (int32_t *)to + done, found)
                               : tt__safetensors_floats(type, piece, part, (float *)to + done, found);
        if (fit < part)
            status = tt__fail(s->ctx, TT_ERR_FORMAT,
                              "'%s': tensor '%.200s' has %s at element %lld, which a %s cannot hold: "
                              "use another file", s->path,
                              info->name, found, (long long)(first + done + fit),
                              integers ? "32-bit integer" : "float");
    }
    return status;
}

tt_status tt_safetensors_read_f32(const tt_safetensors *s, int i, int64_t first, int64_t n, float *to)
{
    return tt__safetensors_elements(s, i, first, n, false, to);
}

tt_status tt_safetensors_read_i32(const tt_safetensors *s, int i, int64_t first, int64_t n, int32_t *to)
{
    return tt__safetensors_elements(s, i, first, n, true, to);
}

struct tt_safetensors_writer {
    tt_context *ctx;
    int count;
    size_t *ends;     /* for each tensor: offset of its end from the first tensor */
    char **names;     /* names of the tensors, for errors */
    size_t written;
    tt__writer file;
};

static void tt__safetensors_writer_free(tt_safetensors_writer *w)
{
    for (int i = 0; w->names && i < w->count; i++) tt__free(w->ctx, w->names[i]);
    void *const owned[] = {w->ends, w->names, w};
    tt__free_all(w->ctx, owned, TT__COUNT(owned));
}

/* Prints the whole header, except its padding. The tensors come in the order of `tensors`. */
static void tt__safetensors_header(tt__text_buffer *text, const tt_tensor_info *tensors, int count,
                                   const size_t *ends, const char *const *metadata)
{
    const bool more = metadata && metadata[0];
    tt__print(text, "{%s", more ? "\"__metadata__\":{" : "");
    for (int i = 0; more && metadata[i]; i++) {
        if (i) tt__print(text, i % 2 ? ":" : ",");
        tt__json_quote(text, metadata[i]);
    }
    if (more) tt__print(text, "}");
    for (int i = 0; i < count; i++) {
        if (i || more) tt__print(text, ",");
        tt__json_quote(text, tensors[i].name);
        tt__print(text, ":{\"dtype\":\"%s\",\"shape\":[", tensors[i].dtype);
        for (int d = 0; d < tensors[i].ndim; d++)
            tt__print(text, "%s%lld", d ? "," : "", (long long)tensors[i].dims[d]);
        tt__print(text, "],\"data_offsets\":[%zu,%zu]}", i ? ends[i - 1] : 0, ends[i]);
    }
    tt__print(text, "}");
}

/* Fails if a file with these tensors and metadata would be invalid. Sets w->ends and w->names. */
static tt_status tt__safetensors_declare(tt_safetensors_writer *w, const char *path,
                                         const tt_tensor_info *tensors, int count,
                                         const char *const *metadata)
{
    tt_context *ctx = w->ctx;
    size_t n = (size_t)(count > 0 ? count : 1), end = 0;
    if (count < 0 || (count > 0 && !tensors))
        return tt__fail(ctx, TT_ERR_ARGUMENT,
                        "'%s': cannot write %d tensors: the number must be at least 0, and the list not NULL",
                        path, count);
    for (int i = 0; metadata && metadata[i]; i++) {
        if (!tt__is_utf8(metadata[i]))
            return tt__fail(ctx, TT_ERR_ARGUMENT, "'%s': metadata string %d is not valid UTF-8", path, i);
        if (i % 2) continue;
        if (!metadata[i + 1])
            return tt__fail(ctx, TT_ERR_ARGUMENT, "'%s': the metadata key \"%.200s\" has no value after it: "
                            "add one", path, metadata[i]);
        for (int k = 0; k < i; k += 2)
            if (strcmp(metadata[k], metadata[i]) == 0)
                return tt__fail(ctx, TT_ERR_ARGUMENT,
                                "'%s': the metadata key \"%.200s\" is given twice: give each key once", path,
                                metadata[i]);
    }
    w->ends = (size_t *)tt__calloc(ctx, n * sizeof *w->ends);
    w->names = (char **)tt__calloc(ctx, n * sizeof *w->names);
    if (!w->ends || !w->names) return TT_ERR_MEMORY;
    w->count = count;
    for (int i = 0; i < count; i++) {
        const tt_tensor_info *t = &tensors[i];
        size_t bytes;
        int type = tt__safetensors_type(t->dtype);
        bool dims = t->ndim >= 0 && t->ndim <= TT__COUNT(t->dims);
        for (int d = 0; dims && d < t->ndim; d++) dims = t->dims[d] >= 0;
        if (!t->name || !tt__is_utf8(t->name) || strcmp(t->name, "__metadata__") == 0)
            return tt__fail(ctx, TT_ERR_ARGUMENT, "'%s': tensor %d of %d has no usable name: it must be "
                            "UTF-8 and not \"__metadata__\"", path, i, count);
        if (type < 0)
            return tt__fail(ctx, TT_ERR_ARGUMENT,
                            "'%s': tensor '%.200s' has the dtype '%.40s', which safetensors does not define",
                            path, t->name, t->dtype ? t->dtype : "NULL");
        if (!dims || !tt__safetensors_size(t, type, &bytes) || bytes > (size_t)INT64_MAX - end)
            return tt__fail(ctx, TT_ERR_ARGUMENT, "'%s': tensor '%.200s' has a shape that cannot be written: "
                            "expected 0 to %d dimensions >= 0, without overflow of the size", path, t->name,
                            TT__COUNT(t->dims));
        if (!(w->names[i] = tt__strdup(ctx, t->name))) return TT_ERR_MEMORY;
        w->ends[i] = end += bytes;
    }
    tt__strings all = {(const char *const *)w->names, sizeof *w->names};
    const char *twice;
    uint32_t *order = tt__sort_strings(ctx, all, count, &twice);
    tt__free(ctx, order);
    if (!order) return TT_ERR_MEMORY;
    if (!twice) return TT_OK;
    return tt__fail(ctx, TT_ERR_ARGUMENT, "'%s': two tensors are named '%.200s': rename one of them", path,
                    twice);
}

tt_safetensors_writer *tt_safetensors_begin(tt_context *ctx, const char *path, const tt_tensor_info *tensors,
                                            int count, const char *const *metadata)
{
    tt_safetensors_writer *w = (tt_safetensors_writer *)tt__calloc(ctx, sizeof *w);
    if (!w) return NULL;
    w->ctx = ctx;
    tt__text_buffer text = {NULL, 0, 0};
    tt_status status = tt__safetensors_declare(w, path, tensors, count, metadata);
    /* text.to is NULL: only counts the bytes of the header. */
    if (status == TT_OK) tt__safetensors_header(&text, tensors, count, w->ends, metadata);
    uint64_t padded = (text.length + 7) & ~(uint64_t)7; /* the data starts at a multiple of 8 */
    if (status == TT_OK && padded > TT__SAFETENSORS_HEADER)
        status = tt__fail(ctx, TT_ERR_ARGUMENT, "'%s': the header would have %llu bytes, but the format "
                          "allows %u: write fewer tensors", path, (unsigned long long)padded,
                          TT__SAFETENSORS_HEADER);
    text.capacity = (size_t)padded + 1;
    if (status == TT_OK && !(text.to = (char *)tt__alloc(ctx, text.capacity))) status = TT_ERR_MEMORY;
    if (status == TT_OK) status = tt__writer_begin(&w->file, ctx, path);
    if (status == TT_OK) {
        text.length = 0;
        tt__safetensors_header(&text, tensors, count, w->ends, metadata);
        memset(text.to + text.length, ' ', (size_t)padded - text.length);
        tt__write(&w->file, &padded, sizeof padded);
        tt__write(&w->file, text.to, (size_t)padded);
        status = w->file.status;
        if (status != TT_OK) tt__writer_end(&w->file);
    }
    tt__free(ctx, text.to);
    if (status == TT_OK) return w;
    tt__safetensors_writer_free(w);
    return NULL;
}

tt_status tt_safetensors_write(tt_safetensors_writer *w, const void *bytes, size_t n)
{
    size_t total = w->count ? w->ends[w->count - 1] : 0;
    if (w->file.status != TT_OK) return w->file.status;
    if (n > total - w->written)
        return w->file.status = tt__fail(w->ctx, TT_ERR_ARGUMENT, "'%s': the call adds %zu bytes more than "
                                         "the %zu of all declared tensors", w->file.path,
                                         n - (total - w->written), total);
    if (n) tt__write(&w->file, bytes, n);
    w->written += n;
    return w->file.status;
}

tt_status tt_safetensors_end(tt_safetensors_writer *w)
{
    size_t total = w->count ? w->ends[w->count - 1] : 0;
    if (w->file.status == TT_OK && w->written < total) {
        int i = 0;
        while (w->ends[i] <= w->written) i++;
        w->file.status = tt__fail(w->ctx, TT_ERR_ARGUMENT, "'%s' is %zu bytes short, because tensor '%.200s' "
                                  "(%d of %d) lacks %zu of its bytes: write all bytes of each tensor; "
                                  "the file was not written", w->file.path, total - w->written,
                                  w->names[i], i + 1, w->count, w->ends[i] - w->written);
    }
    tt_status status = tt__writer_end(&w->file);
    tt__safetensors_writer_free(w);
    return status;
}

/* Ends the file and frees w, which may be NULL. If `status`, the caller's status so far, is an error, writes
   nothing and returns `status`. */
static tt_status tt__safetensors_finish(tt_safetensors_writer *w, tt_status status)
{
    if (!w) return status;
    if (w->file.status == TT_OK) w->file.status = status;
    return tt_safetensors_end(w);
}
