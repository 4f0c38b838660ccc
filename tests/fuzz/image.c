/* Fuzzes images: records of CIFAR-10, image files, resizing, and a loader's work on images of any size.

   Input: a byte that chooses one of four functions; then the function's input. */
#include "fuzz.h"
#include "examples/datasets.h"

/* Fuzzes records of CIFAR-10. Input: flags, names of classes (empty: none), and the records of a file. */
static void cifar_of(fuzz_input *in)
{
    int flags = fuzz_byte(in);
    char why[DATASET_WHY] = "";
    const char *names[CIFAR_CLASSES];
    cifar images = {NULL, NULL, 0};
    fuzz_input text = fuzz_part(in);
    char *copy = (char *)malloc(text.left + 1);
    size_t n = in->left, whole = (n + CIFAR_PIXELS) / (CIFAR_PIXELS + 1) * (CIFAR_PIXELS + 1);
    size_t used = flags & 2 ? whole : n; /* flags & 2: short inputs become whole records */
    uint8_t *bytes = (uint8_t *)malloc(used ? used : 1);
    FUZZ_CHECK(copy && bytes);
    memcpy(copy, text.at, text.left);
    copy[text.left] = 0;
    memset(bytes, 7, used);
    if (n) memcpy(bytes, in->at, n);
    bool named = text.left && cifar_names(copy, "names", names, why);
    for (int k = 0; named && k < CIFAR_CLASSES; k++) FUZZ_CHECK(*names[k]);
    FUZZ_CHECK(named || !text.left || (*why && !getenv("FUZZ_GOOD")));
    *why = 0;
    if (cifar_add(&images, "records", bytes, used, why)) {
        FUZZ_CHECK(images.count >= 1 && images.count == (int)(used / (CIFAR_PIXELS + 1)));
        for (int k = 0; k < images.count; k++) {
            tt_image image;
            FUZZ_CHECK(images.labels[k] >= 0 && images.labels[k] < CIFAR_CLASSES);
            FUZZ_CHECK(!cifar_image(&images, k, &image) &&
                       image.pixels[CIFAR_PIXELS - 1] == bytes[(size_t)(k + 1) * (CIFAR_PIXELS + 1) - 1]);
        }
    } else {
        FUZZ_CHECK(*why && !getenv("FUZZ_GOOD"));
    }
    cifar_free(&images);
    free(bytes);
    free(copy);
}

/* Makes an image, small or narrow; fill_image repeats the input over its pixels. */
static uint8_t *make_image(fuzz_input *in, tt_image *image)
{
    int wide = fuzz_byte(in);
    image->channels = 1 + fuzz_byte(in) % 4;
    image->height = wide & 1 ? 1 + fuzz_number(in) % (wide & 4 ? 65535 : 512) : 1 + fuzz_byte(in) % 32;
    image->width = wide & 1 ? 1 + fuzz_byte(in) % 2 : 1 + fuzz_byte(in) % 32;
    if (wide & 2) {
        int swap = image->height;
        image->height = image->width;
        image->width = swap;
    }
    size_t n = (size_t)image->height * (size_t)image->width * (size_t)image->channels;
    uint8_t *pixels = (uint8_t *)malloc(n);
    FUZZ_CHECK(pixels);
    image->pixels = pixels;
    return pixels;
}

static void fill_image(const fuzz_input *in, const tt_image *image, uint8_t *pixels)
{
    size_t n = (size_t)image->height * (size_t)image->width * (size_t)image->channels;
    for (size_t k = 0; k < n; k++) pixels[k] = in->left ? in->at[k % in->left] : (uint8_t)(k * 37);
}

/* Returns by how many grey levels a resized pixel may exceed the largest pixel of the image, or be below the
   smallest: each weight of a sum is rounded to 22 bits, as in Pillow. The image is resized from `from` to
   `to` pixels in one direction. */
static int slack(int from, int to)
{
    double weights = 2.0 * (from > to ? from / to + 1 : 1) + 1, max = 255 * weights / (1 << 23);
    return (int)(2 * max); /* half a level or more rounds up */
}

/* Fuzzes resizing: no channel leaves its range of values. Input: the image, and two numbers: the new size. */
static void resize(fuzz_input *in)
{
    tt_image image;
    uint8_t *pixels = make_image(in, &image), low[4] = {255, 255, 255, 255}, high[4] = {0, 0, 0, 0};
    bool alpha = image.channels % 2 == 0;
    int tall = fuzz_byte(in), height = tall & 1 ? fuzz_number(in) : fuzz_byte(in),
        width = tall & 2 ? fuzz_number(in) : fuzz_byte(in);
    while (height * (int64_t)width > 1 << 13) height /= 2, width /= 2;
    fill_image(in, &image, pixels);
    for (int64_t k = 0; k < (int64_t)image.height * image.width * image.channels; k++) {
        int c = (int)(k % image.channels);
        if (pixels[k] < low[c]) low[c] = pixels[k];
        if (pixels[k] > high[c]) high[c] = pixels[k];
    }
    tt_context *ctx = fuzz_open();
    size_t n = (size_t)height * (size_t)width * (size_t)image.channels;
    uint8_t *to = (uint8_t *)malloc(n ? n : 1);
    FUZZ_CHECK(to);
    if (fuzz_ok(ctx, tt_image_resize(ctx, &image, height, width, to) == TT_OK)) {
        int more = slack(image.height, height) + slack(image.width, width);
        for (size_t k = 0; k < n; k++) {
            size_t c = k % (size_t)image.channels;
            /* The division of a colour by its alpha is rounded, so the colour may leave its range. */
            bool rounds = alpha && c + 1 < (size_t)image.channels;
            FUZZ_CHECK(rounds || (to[k] + more >= low[c] && to[k] - more <= high[c]));
        }
        if (height == image.height && width == image.width && !alpha) FUZZ_CHECK(memcmp(to, pixels, n) == 0);
    }
    fuzz_close(ctx);
    free(to);
    free(pixels);
}

static const char *read_image(void *user, int64_t index, tt_image *image)
{
    if (index == 2) return "it is the third";
    *image = *(const tt_image *)user;
    return NULL;
}

/* Fuzzes an image loader. Input: the image, which the data set holds one to four times, and options of the
   loader. */
static void transforms(fuzz_input *in)
{
    static const char *const names[] = {"a", "b"};
    static const int labels[] = {0, 1, 0, 1};
    tt_image image;
    uint8_t *pixels = make_image(in, &image);
    tt_image_source source;
    memset(&source, 0, sizeof source);
    source.count = 1 + fuzz_byte(in) % 4;
    source.labels = labels;
    source.class_names = names;
    source.classes = 2;
    source.read = read_image;
    source.user = &image;
    int flags = fuzz_byte(in);
    tt_image_options o = tt_image_options_default(flags & 1 ? fuzz_number(in) : fuzz_byte(in),
                                                  flags & 2 ? fuzz_number(in) : fuzz_byte(in));
    if (o.height * (int64_t)o.width > 1 << 12) o.height = o.height % 256, o.width = o.width % 256;
    o.channels = fuzz_byte(in) % 6;
    o.resize_height = flags & 4 ? fuzz_byte(in) : 0;
    o.resize_width = flags & 4 ? fuzz_byte(in) : 0;
    o.pad = flags & 8 ? fuzz_number(in) : flags & 16 ? fuzz_byte(in) % 16 : 0;
    o.random_crop = (flags & 32) != 0;
    o.flip = (flags & 64) != 0;
    tt_loader_options lo = tt_loader_options_default();
    lo.batch = 1 + fuzz_byte(in) % 4;
    lo.threads = 0;
    fill_image(in, &image, pixels);
    tt_context *ctx = fuzz_open();
    tt_dataset *d = tt_dataset_images(ctx, &source);
    tt_loader *l = FUZZ_MUST(ctx, d != NULL) ? tt_image_loader_new(ctx, d, &o, &lo) : NULL;
    if (fuzz_ok(ctx, l != NULL)) {
        tt_batch b;
        int64_t seen = 0;
        while (tt_loader_next(l, &b)) {
            unsigned sum = 0;
            FUZZ_CHECK(b.seqs >= 1 && b.seqs <= lo.batch &&
                       b.image_bytes == (int64_t)o.height * o.width * o.channels && b.rows == 0 && !b.ids);
            for (int64_t k = 0; k < b.seqs * b.image_bytes; k++) sum += b.pixels[k];
            for (int i = 0; i < b.seqs; i++)
                FUZZ_CHECK(b.index[i] >= 0 && b.index[i] < source.count && b.labels[i] == labels[b.index[i]]);
            FUZZ_CHECK(sum <= 255u * (unsigned)(b.seqs * b.image_bytes));
            seen += b.seqs;
        }
        if (fuzz_ok(ctx, tt_loader_status(l) == TT_OK)) FUZZ_CHECK(seen == source.count && seen < 3);
        tt_loader_free(l);
    }
    tt_dataset_free(d);
    fuzz_close(ctx);
    free(pixels);
}

/* Fuzzes image files: reads a PPM or PGM, and the orientation of a JPEG. */
static void files(fuzz_input *in)
{
    tt_image image = {NULL, 0, 0, 0};
    const int turn = jpeg_orientation(in->at, in->left);
    FUZZ_CHECK(turn >= 1 && turn <= 8);
    if (pnm_read(in->at, in->left, true, &image)) return;
    const size_t n = (size_t)image.height * (size_t)image.width * (size_t)image.channels;
    FUZZ_CHECK(image.pixels >= in->at && n <= in->left - (size_t)(image.pixels - in->at));
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n)
{
    static void (*const kinds[])(fuzz_input *in) = {cifar_of, resize, transforms, files};
    fuzz_input in = {bytes, n};
    fuzz_remove_all();
    kinds[fuzz_byte(&in) % 4](&in);
    return 0;
}
