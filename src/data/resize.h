#pragma once
#include "../base/base.h"
#include "../text/encoder.h"

/* ===========================================================================================================
   DATA                                                                                              src/data/
   Images, datasets, tables, token streams, and loaders, which divide a step's examples into micro-batches.
   Uses base, files and text.
   ======================================================================================================== */

/* ------------------------------------------------------------------------------------------------ images */

#define TT__IMAGE_SIDE 65535 /* max height and width, as in JPEG */
#define TT__WEIGHT_BITS 22   /* fraction bits of a weight: of the 32 bits of a sum, a level takes 8, and 2 are
                                spare for sums out of range */

/* A filter that resamples one axis of an image from `in` to `out` pixels. Output pixel x is a weighted sum of
   used[x] consecutive input pixels, the first of which has the number first[x]. The t-th of the input pixels,
   from 0 on, has the weight weights[x * taps + t]. */
typedef struct tt__filter {
    int in, out, taps;
    tt_resample kind;
    int32_t *first, *used; /* for each output pixel: number of the first input pixel (first) and number of
                              input pixels (used) */
    int32_t *weights;      /* (out, taps), times 2^TT__WEIGHT_BITS; a row's weights sum to about 1 */
    tt__buffer memory;
} tt__filter;

static double tt__nearest(double x) { (void)x; return 1; }
static double tt__triangle(double x) { x = fabs(x); return x < 1 ? 1 - x : 0; }
static double tt__cubic(double x) /* the filter of Keys (1981) with a = -1/2 */
{
    x = fabs(x);
    return x < 1 ? (1.5 * x - 2.5) * x * x + 1 : x < 2 ? -0.5 * (((x - 5) * x + 8) * x - 4) : 0;
}
static double tt__sinc(double x) { x *= 3.14159265358979323846; return x == 0 ? 1 : tt__sin(x) / x; }
static double tt__lanczos(double x) { return x >= -3 && x < 3 ? tt__sinc(x) * tt__sinc(x / 3) : 0; }

/* Computes a filter as Pillow does (src/libImaging/Resample.c). The weight of an input pixel is a function of
   its distance from the output pixel's centre. To reduce an image, the filter stretches this function by the
   ratio in / out. The weights are normalised over the input pixels that exist. For TT_NEAREST the position of
   the input pixel is a running sum of steps, as in Pillow (src/libImaging/Geometry.c). Returns false if
   memory runs out. */
static bool tt__filter_make(tt_context *ctx, tt__filter *f, int in, int out, tt_resample kind)
{
    static const struct { double (*weight)(double); int inputs; } kinds[] = {
        {tt__nearest, 0}, {tt__lanczos, 3}, {tt__triangle, 1}, {tt__cubic, 2}}; /* in tt_resample's order */
    double scale = (double)in / out, stretch = scale < 1 ? 1 : scale, narrow = 1 / stretch;
    const double support = kinds[kind].inputs * stretch;
    if (f->in == in && f->out == out && f->kind == kind) return true;
    f->in = 0;
    f->taps = 2 * (int)ceil(support) + 1;
    /* A filter of 2^14 taps or more truncates its weights instead of rounding them, because rounding errors
       could add up to the level 256. */
    double half = f->taps < 1 << 14 ? 0.5 : 0;
    if (!(f->first = (int32_t *)tt__buffer_get(ctx, &f->memory, (size_t)out,
                                               ((size_t)f->taps + 2) * sizeof(int32_t))))
        return false;
    f->used = f->first + out;
    f->weights = f->used + out;
    double nearest = 0.5 * scale;
    for (int x = 0; x < out; x++, nearest += scale) {
        double center = (x + 0.5) * scale, sum = 0;
        int first = (int)tt__max(0, (int)(center - support + 0.5));
        int end = (int)tt__min(in, (int)(center + support + 0.5));
        int32_t *w = f->weights + (size_t)x * (size_t)f->taps;
        if (kind == TT_NEAREST) first = (int)tt__min(in - 1, (int)nearest), end = first + 1;
        for (int k = first; k < end; k++) sum += kinds[kind].weight((k - center + 0.5) * narrow);
        for (int k = first; k < end; k++) {
            double weight = kinds[kind].weight((k - center + 0.5) * narrow) / sum * (1 << TT__WEIGHT_BITS);
            w[k - first] = (int32_t)(weight < 0 ? weight - half : weight + half);
        }
        /* Drops zero weights at the ends, so that an axis that keeps its size has one tap of weight 1. */
        while (end > first + 1 && !w[end - 1 - first]) end--;
        int zeros = 0;
        while (first + zeros + 1 < end && !w[zeros]) zeros++;
        memmove(w, w + zeros, sizeof *w * (size_t)(end - first - zeros));
        f->first[x] = first + zeros;
        f->used[x] = end - first - zeros;
    }
    f->in = in;
    f->out = out;
    f->kind = kind;
    return true;
}

/* Returns the level (0 to 255) of a pixel from the weighted sum of levels. With negative weights the sum may
   be out of range; the level is then clamped. */
static uint32_t tt__level(uint32_t sum)
{
    return sum < 1u << 30 ? sum >> TT__WEIGHT_BITS : (int32_t)sum < 0 ? 0 : 255;
}

/* A window of an image: rows [top, top + height) and columns [left, left + width). mirror: the columns are
   read from right to left. */
typedef struct tt__window { int top, left, height, width; bool mirror; } tt__window;

/* Resamples one row of an image horizontally to the columns of a window. A pixel of `in` has `stride`
   channels. Channel c of an output pixel comes from channel `c * step` of `in`. */
static void tt__resample_across(const tt__filter *f, const tt__window *window, const uint8_t *in, int stride,
                                int step, int channels, uint32_t *out)
{
    const uint32_t half = 1u << (TT__WEIGHT_BITS - 1);
    for (int k = 0; k < window->width; k++, out += channels) {
        int x = window->left + (window->mirror ? window->width - 1 - k : k), used = f->used[x];
        const int32_t *w = f->weights + (size_t)x * (size_t)f->taps;
        const uint8_t *from = in + (size_t)f->first[x] * (size_t)stride;
        if (used == 1) {
            for (int c = 0; c < channels; c++) out[c] = from[c * step];
        } else if (channels == 3) {
            uint32_t sum0 = half, sum1 = half, sum2 = half;
            for (int t = 0; t < used; t++, from += stride) {
                sum0 += (uint32_t)w[t] * from[0];
                sum1 += (uint32_t)w[t] * from[step];
                sum2 += (uint32_t)w[t] * from[2 * step];
            }
            out[0] = tt__level(sum0);
            out[1] = tt__level(sum1);
            out[2] = tt__level(sum2);
        } else {
            for (int c = 0; c < channels; c++) {
                uint32_t sum = half;
                for (int t = 0; t < used; t++) sum += (uint32_t)w[t] * from[t * stride + c * step];
                out[c] = tt__level(sum);
            }
        }
    }
}

/* Computes one row of n outputs as the weighted sum of `taps` rows of `in`, which are `pitch` numbers (a
   multiple of 4) apart. As each sum fits an int32_t, one 64-bit multiplication computes two products. If the
   lower of the two sums is negative, the upper sum is 1 too small. */
static void tt__resample_down(const int32_t *w, int taps, const uint32_t *in, size_t pitch, size_t n,
                              uint8_t *out)
{
    const uint64_t half = (uint64_t)1 << (TT__WEIGHT_BITS - 1) | (uint64_t)1 << (TT__WEIGHT_BITS + 31);
    if (taps == 1) { /* the weight is 1 */
        for (size_t i = 0; i < n; i++) out[i] = (uint8_t)in[i];
        return;
    }
    for (size_t i = 0; i < n; i += 4) {
        const uint32_t *from = in + i;
        uint64_t sum0 = half, sum1 = half, two[2];
        uint8_t four[4];
        for (int t = 0; t < taps; t++, from += pitch) {
            const uint64_t weight = (uint64_t)(int64_t)w[t];
            memcpy(two, from, sizeof two);
            sum0 += weight * two[0];
            sum1 += weight * two[1];
        }
        four[0] = (uint8_t)(sum0 >> TT__WEIGHT_BITS);
        four[1] = (uint8_t)(sum0 >> (TT__WEIGHT_BITS + 32));
        four[2] = (uint8_t)(sum1 >> TT__WEIGHT_BITS);
        four[3] = (uint8_t)(sum1 >> (TT__WEIGHT_BITS + 32));
        if (__builtin_expect(((sum0 | sum1) & 0xC0000000C0000000u) != 0, 0))
            for (int k = 0; k < 4; k++) { /* clamps the levels, at least one of which is not in 0 to 255 */
                const uint64_t sum = k < 2 ? sum0 : sum1;
                const uint32_t low = (uint32_t)sum;
                four[k] = (uint8_t)tt__level(k % 2 ? (uint32_t)(sum >> 32) + (low >> 31) : low);
            }
        if (n - i >= 4) memcpy(out + i, four, 4);
        else memcpy(out + i, four, n - i);
    }
}

/* Multiplies the colours of pixels by alpha / 255 and rounds the products or, if `back`, divides the colours
   by alpha / 255. The last channel is alpha. */
static void tt__scale_by_alpha(const uint8_t *in, size_t pixels, int channels, bool back, uint8_t *out)
{
    for (size_t i = 0; i < pixels; i++, in += channels, out += channels) {
        uint32_t alpha = in[channels - 1];
        for (int c = 0; c < channels - 1; c++)
            out[c] = !back  ? (uint8_t)((2 * in[c] * alpha + 255) / 510)
                   : !alpha ? in[c] : (uint8_t)tt__min(255, in[c] * 255u / alpha);
        out[channels - 1] = (uint8_t)alpha;
    }
}

typedef struct tt__resampler { /* filters and scratch memory of a thread */
    tt__filter across, down;
    tt__buffer rows, opaque;
} tt__resampler;

static void tt__resampler_free(tt_context *ctx, tt__resampler *r)
{
    tt__free(ctx, r->across.memory.memory);
    tt__free(ctx, r->down.memory.memory);
    tt__free(ctx, r->rows.memory);
    tt__free(ctx, r->opaque.memory);
}

/* Resizes an image to height * width pixels and writes a window of the result to `to`, whose rows are `pitch`
   bytes apart. channels: number of channels of `to`. An image with 1 channel allows any number: each channel
   of `to` is a copy. An image with 4 channels allows 4 and, without alpha, 3. All other images only allow
   their own number of channels. Returns false if memory runs out. */
static bool tt__resample_image(tt_context *ctx, tt__resampler *r, const tt_image *image, int height,
                               int width,
                         tt_resample kind, int channels, const tt__window *window, uint8_t *to, size_t pitch)
{
    int stride = image->channels, end = 0;
    if (!tt__filter_make(ctx, &r->across, image->width, width, kind) ||
        !tt__filter_make(ctx, &r->down, image->height, height, kind))
        return false;
    int first = r->down.first[window->top];
    for (int y = window->top; y < window->top + window->height; y++)
        end = (int)tt__max(end, r->down.first[y] + r->down.used[y]);
    bool alpha = channels == stride && channels % 2 == 0 && kind != TT_NEAREST &&
        (height != image->height || width != image->width);
    size_t n = (size_t)window->width * (size_t)channels, row = (n + 3) & ~(size_t)3,
        image_row = (size_t)image->width * (size_t)stride;
    uint32_t *rows = (uint32_t *)tt__buffer_get(ctx, &r->rows, (size_t)(end - first), row * sizeof *rows);
    uint8_t *opaque = alpha ? (uint8_t *)tt__buffer_get(ctx, &r->opaque, image_row, 1) : NULL;
    if (!rows || (alpha && !opaque)) return false;
    for (int y = first; y < end; y++) {
        const uint8_t *in = image->pixels + (size_t)y * image_row;
        if (alpha) tt__scale_by_alpha(in, (size_t)image->width, channels, false, opaque);
        uint32_t *out = rows + (size_t)(y - first) * row;
        tt__resample_across(&r->across, window, alpha ? opaque : in, stride, stride > 1, channels, out);
        for (size_t i = n; i < row; i++) out[i] = 0;
    }
    for (int y = window->top; y < window->top + window->height; y++, to += pitch) {
        tt__resample_down(r->down.weights + (size_t)y * (size_t)r->down.taps, r->down.used[y],
                          rows + (size_t)(r->down.first[y] - first) * row, row, n, to);
        if (alpha) tt__scale_by_alpha(to, (size_t)window->width, channels, true, to);
    }
    return true;
}

static bool tt__side(int n) { return n >= 1 && n <= TT__IMAGE_SIDE; }

static bool tt__image_valid(const tt_image *image)
{
    bool sides = tt__side(image->height) && tt__side(image->width);
    return image->pixels && sides && image->channels >= 1 && image->channels <= 4;
}

tt_status tt_image_resize(tt_context *ctx, const tt_image *image, int height, int width, uint8_t *to)
{
    tt__resampler r;
    tt__window whole = {0, 0, height, width, false};
    if (!tt__image_valid(image) || !tt__side(height) || !tt__side(width))
        return tt__fail(ctx, TT_ERR_ARGUMENT, "tt_image_resize: cannot resize %d x %d pixels%s of %d "
                        "channels to %d x %d; expected sides of 1 to %d pixels and 1 to 4 channels",
                        image->height, image->width, image->pixels ? "" : " (NULL)", image->channels, height,
                        width, TT__IMAGE_SIDE);
    memset(&r, 0, sizeof r);
    bool ok = tt__resample_image(ctx, &r, image, height, width, TT_BILINEAR, image->channels, &whole, to,
                           (size_t)width * (size_t)image->channels);
    tt__resampler_free(ctx, &r);
    return ok ? TT_OK : tt__fail(ctx, TT_ERR_MEMORY, "tt_image_resize: out of memory to resize %d x %d "
                                 "pixels to %d x %d: free memory", image->height, image->width, height,
                                 width);
}
