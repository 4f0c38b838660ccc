/* Measures the images a second that one loader thread prepares: resized, padded by an eighth, cropped at
   random and flipped, as examples/vit_l16.c --augment does. Also measures the share of a vision transformer's
   training step that is spent waiting for images, while the loader's thread runs beside the step's. */

#include "bench.h"

/* Returns the same image each time at no cost, so that only the loader's own work takes time. */
static const char *give(void *user, int64_t index, tt_image *image)
{
    (void)index;
    *image = *(const tt_image *)user;
    return NULL;
}

static tt_dataset *dataset(tt_context *ctx, tt_image *image, int count)
{
    static const char *const names[] = {"a", "b"};
    tt_image_source s;
    int *labels = (int *)malloc((size_t)count * sizeof *labels);
    if (!labels) bench_die("out of memory");
    for (int i = 0; i < count; i++) labels[i] = i % 2;
    memset(&s, 0, sizeof s);
    s.count = count;
    s.labels = labels;
    s.class_names = names;
    s.classes = 2;
    s.read = give;
    s.user = image;
    tt_dataset *d = tt_dataset_images(ctx, &s);
    if (!d) bench_die("%s", tt_error(ctx));
    free(labels);
    return d;
}

static tt_loader *loader(tt_context *ctx, const tt_dataset *d, int side, int batch)
{
    tt_image_options i = tt_image_options_default(side, side);
    tt_loader_options o = tt_loader_options_default();
    i.resize_height = i.resize_width = side;
    i.pad = side / 8;
    i.random_crop = i.flip = true;
    o.batch = batch;
    o.threads = 1;
    tt_loader *l = tt_image_loader_new(ctx, d, &i, &o);
    if (!l) bench_die("%s", tt_error(ctx));
    return l;
}

static void next(tt_context *ctx, tt_loader *l, tt_batch *b, int64_t *epoch)
{
    while (!tt_loader_next(l, b))
        if (tt_loader_status(l) != TT_OK || tt_loader_seek(l, ++*epoch, 0) != TT_OK)
            bench_die("%s", tt_error(ctx));
}

/* Measures training steps of a vision transformer. delivered: images a second that the loader thread prepares
   when nothing else runs. */
static void steps_of(tt_image *image, const char *size, int side, int batch, int steps, double delivered)
{
    tt_context *ctx = bench_reopen();
    /* The epoch has images for the measured steps, for the steps not measured, and for the batches that the
       loader prepares ahead. */
    tt_dataset *d = dataset(ctx, image, batch * (steps + 4));
    tt_loader *l = loader(ctx, d, side, batch);
    tt_vit_config c = tt_vit_config_default(size);
    tt_vit m;
    tt_batch b;
    tt_stats s;
    char name[128];
    int64_t epoch = 0;
    double begin = 0, waited = 0;
    c.image_size = side;
    c.classes = 2;
    if (tt_vit_new(ctx, &m, &c) != TT_OK) bench_die("%s", tt_error(ctx));
    tt_model model = tt_vit_classifier(&m);
    tt_train_options o = tt_train_options_default();
    o.schedule.kind = TT_CONSTANT;
    o.compile.precision = bench.precision;
    o.max_seqs = batch;
    tt_trainer *t = tt_trainer_new(ctx, &model, &o);
    if (!t) bench_die("%s", tt_error(ctx));
    /* step 0 is not timed: no image is ready, and the arena is allocated */
    for (int step = 0; step <= steps; step++) {
        next(ctx, l, &b, &epoch);
        if (tt_train_batch(t, &b, &s, NULL) != TT_OK) bench_die("%s", tt_error(ctx));
        if (step == 0) begin = tt__seconds(), waited = tt_loader_waited(l);
    }
    double took = tt__seconds() - begin;
    waited = tt_loader_waited(l) - waited;
    snprintf(name, sizeof name, "ViT-%s, training", size);
    bench_row(name, steps * batch / took, "images/s", delivered);
    snprintf(name, sizeof name, "ViT-%s, a step", size);
    bench_row(name, 1e3 * took / steps, "ms", 0);
    snprintf(name, sizeof name, "ViT-%s, a step waits for images", size);
    bench_row(name, 1e3 * waited / steps, "ms", 0);
    snprintf(name, sizeof name, "ViT-%s, share of a step spent waiting", size);
    bench_row(name, 100 * waited / took, "%", 0);
    tt_trainer_free(t);
    tt_loader_free(l);
    tt_dataset_free(d);
    tt_vit_free(&m);
}

int main(int argc, char **argv)
{
    int side = 224, from = 32, batch = 32, steps = 3;
    const char *size = NULL;
    const bench_flag flags[] = {
        {"--from", &from, NULL, NULL, "height and width of the images that are read"},
        {"--pixels", &side, NULL, NULL, "height and width of the model's images"},
        {"--seqs", &batch, NULL, NULL, "images in a step"},
        {"--vit", NULL, &size, NULL, "SIZE of a vision transformer, instead of Ti/16 and S/16"},
        {"--steps", &steps, NULL, NULL, "measured steps, after one that is not measured"},
    };
    tt_context *ctx = bench_open(argc, argv, flags, TT__COUNT(flags));
    if (from > TT__IMAGE_SIDE || side > TT__IMAGE_SIDE)
        bench_die("--from and --pixels must be at most %d", TT__IMAGE_SIDE);
    tt_image image = {NULL, from, from, 3};
    int64_t bytes = (int64_t)from * from * 3, epoch = 0, images = 0;
    uint8_t *pixels = (uint8_t *)malloc((size_t)bytes);
    char name[128];
    uint32_t random = 1;
    tt_batch b;
    if (!pixels) bench_die("out of memory");
    for (int64_t k = 0; k < bytes; k++) {
        random = random * 1664525u + 1013904223u;
        pixels[k] = (uint8_t)(random >> 24);
    }
    image.pixels = pixels;

    tt_dataset *d = dataset(ctx, &image, 64 * batch);
    tt_loader *l = loader(ctx, d, side, batch);
    for (int k = 0; k < 4; k++) next(ctx, l, &b, &epoch); /* discards what the loader has prepared ahead */
    double begin = tt__seconds();
    do next(ctx, l, &b, &epoch), images += b.seqs;
    while (tt__seconds() - begin < bench.min);
    snprintf(name, sizeof name, "%d x %d pixels to %d x %d, one thread", from, from, side, side);
    double delivered = (double)images / (tt__seconds() - begin);
    bench_row(name, delivered, "images/s", 0);
    tt_loader_free(l);
    tt_dataset_free(d);

    for (int k = 0; k < (size ? 1 : 2); k++)
        steps_of(&image, size ? size : k ? "S/16" : "Ti/16", side, batch, steps, delivered);
    free(pixels);
    bench_close();
    return 0;
}
