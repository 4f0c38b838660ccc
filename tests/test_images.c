/* Tests of src/data/: resizing, CIFAR-10, images that the caller decodes, and their loader. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#define TINYTRAIN_IMPLEMENTATION
#include "tinytrain.h"
#include "test.h"
#include "readers.h"

/* ------------------------------------------------------------------------------------------------- resize */

TEST(resize_golden) /* results equal Pillow's bit for bit */
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    tt_safetensors *s = tt_safetensors_open(ctx, TEST_GOLDEN("resize.safetensors"));
    int cases = 0;
    REQUIRE(s);
    for (int i = 0; i < tt_safetensors_count(s); i++) {
        const tt_tensor_info *from = tt_safetensors_info(s, i);
        char name[32];
        if (!tt__match("*.from", from->name)) continue;
        snprintf(name, sizeof name, "%.*s.to", (int)strcspn(from->name, "."), from->name);
        int k = tt_safetensors_find(s, name);
        REQUIRE(k >= 0);
        const tt_tensor_info *to = tt_safetensors_info(s, k);
        uint8_t *pixels = (uint8_t *)test_tensor(s, i), *want = (uint8_t *)test_tensor(s, k);
        tt_image image = {pixels, (int)from->dims[0], (int)from->dims[1], (int)from->dims[2]};
        uint8_t *have = (uint8_t *)malloc(to->bytes);
        CHECK(tt_image_resize(ctx, &image, (int)to->dims[0], (int)to->dims[1], have) == TT_OK);
        size_t different = 0;
        for (size_t p = 0; p < to->bytes; p++) different += have[p] != want[p];
        if (!CHECK(different == 0))
            printf("resize %s: %zu of %zu bytes differ\n", from->name, different, to->bytes);
        free(have);
        free(want);
        free(pixels);
        cases++;
    }
    CHECK(cases >= 20);
    tt_safetensors_close(s);
    TEST_CLOSE(ctx, &a);
}

static double triangle(double x) { return fabs(x) < 1 ? 1 - fabs(x) : 0; }

/* For all sizes each pixel of a resized image equals, within two roundings, a float64 sum: the sum of all
   pixels of the original image, weighted by a triangle. */
TEST(resize_reference)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    uint64_t seed = 77;
    for (int n = 0; n < 300; n++) {
        int h = 1 + (int)(test_random(&seed) % 24), w = 1 + (int)(test_random(&seed) % 24),
            H = 1 + (int)(test_random(&seed) % 40), W = 1 + (int)(test_random(&seed) % 40);
        int c = n % 2 ? 3 : 1;
        uint8_t *from = (uint8_t *)malloc((size_t)(h * w * c)),
                *to = (uint8_t *)malloc((size_t)(H * W * c) + 1);
        for (int i = 0; i < h * w * c; i++)
            from[i] = n % 5 ? (uint8_t)test_random(&seed) : (uint8_t)(255 * (test_random(&seed) & 1));
        to[H * W * c] = 0x5C;
        tt_image image = {from, h, w, c};
        REQUIRE(tt_image_resize(ctx, &image, H, W, to) == TT_OK);
        CHECK(to[H * W * c] == 0x5C);
        double wide = h > H ? (double)h / H : 1, broad = w > W ? (double)w / W : 1;
        for (int i = 0; i < H * W * c; i++) {
            double cy = (i / c / W + 0.5) * h / H, cx = (i / c % W + 0.5) * w / W, sum = 0, weights = 0;
            for (int y = 0; y < h; y++)
                for (int x = 0; x < w; x++) {
                    double weight = triangle((y + 0.5 - cy) / wide) * triangle((x + 0.5 - cx) / broad);
                    sum += weight * from[(y * w + x) * c + i % c];
                    weights += weight;
                }
            CHECK_NEAR(to[i], sum / weights, 1.001);
        }
        free(from);
        free(to);
    }
    TEST_CLOSE(ctx, &a);
}

TEST(resize_limits)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    uint8_t *line = (uint8_t *)malloc(65535), to[4] = {9, 9, 9, 9};
    tt_image image = {line, 1, 65535, 1};
    /* The only pixel of the result is a sum of 65535 weighted pixels, whose rounding errors could add up to
       more than 255. The result may be smaller than the exact sum by at most 3. */
    for (int level = 0; level < 256; level += 51) {
        memset(line, level, 65535);
        CHECK(tt_image_resize(ctx, &image, 1, 1, to) == TT_OK && to[0] <= level && level - to[0] <= 3);
        image.width = 16380; /* in a sum of 16380 weighted pixels rounding errors stay below 1 */
        CHECK(tt_image_resize(ctx, &image, 1, 2, to) == TT_OK && abs(to[0] - level) <= 1 && to[0] == to[1]);
        image.width = 65535;
    }
    static const struct { int height, width, channels, to_height, to_width; } bad[] = {
        {0, 1, 1, 1, 1}, {1, -1, 1, 1, 1}, {1, 1, 0, 1, 1}, {1, 1, 5, 1, 1}, {1, 65536, 1, 1, 1},
        {1, 1, 1, 0, 1}, {1, 1, 1, 1, 65536}};
    for (int i = 0; i < TEST_COUNT(bad); i++) {
        tt_image wrong = {line, bad[i].height, bad[i].width, bad[i].channels};
        CHECK(tt_image_resize(ctx, &wrong, bad[i].to_height, bad[i].to_width, to) == TT_ERR_ARGUMENT);
        CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "expected sides of 1 to 65535 pixels and 1 to 4 channels");
    }
    image.pixels = NULL;
    CHECK(tt_image_resize(ctx, &image, 1, 1, to) == TT_ERR_ARGUMENT);
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "(NULL)");
    uint8_t alpha[6] = {10, 20, 30, 40, 50, 60};
    tt_image small = {alpha, 3, 1, 2};
    long before = a.calls, calls = 0;
    CHECK(tt_image_resize(ctx, &small, 1, 2, to) == TT_OK);
    calls = a.calls - before;
    for (long n = 1; n <= calls; n++) {
        a.fail_at = a.calls + n;
        CHECK(tt_image_resize(ctx, &small, 1, 2, to) == TT_ERR_MEMORY);
        CHECK_ERROR(ctx, TT_ERR_MEMORY, "3 x 1 pixels to 1 x 2");
    }
    CHECK(calls == 4);
    free(line);
    TEST_CLOSE(ctx, &a);
}

/* ----------------------------------------------------------------------------------------------- CIFAR-10 */

static uint8_t cifar_pixel(int file, int record, int c, int y, int x)
{
    return (uint8_t)(file * 31 + record * 17 + c * 85 + y * 3 + x * 7);
}
static int cifar_label(int file, int record) { return (file + record * 3) % 10; }

/* Writes file `file` of CIFAR-10: 1 to 5 are data_batch_N.bin, 6 is test_batch.bin. */
static void cifar_write(const char *folder, int file, int records)
{
    char name[32];
    uint8_t *bytes = (uint8_t *)malloc((size_t)records * 3073 + 1), *to = bytes;
    for (int r = 0; r < records; r++) {
        *to++ = (uint8_t)cifar_label(file, r);
        for (int c = 0; c < 3; c++)
            for (int y = 0; y < 32; y++)
                for (int x = 0; x < 32; x++) *to++ = cifar_pixel(file, r, c, y, x);
    }
    snprintf(name, sizeof name, file == 6 ? "test_batch.bin" : "data_batch_%d.bin", file);
    test_write(test_path(folder, name), bytes, (size_t)records * 3073);
    free(bytes);
}

/* Reads image i of the dataset through a loader. Returns whether the image is record `record` of `file`. */
static bool cifar_is(tt_context *ctx, const tt_dataset *d, int64_t i, int file, int record)
{
    tt_image_options o = tt_image_options_default(32, 32);
    tt_loader_options lo = tt_loader_options_default();
    tt_batch b;
    lo.batch = 1;
    lo.shuffle = false;
    lo.threads = 0;
    tt_loader *l = tt_image_loader_new(ctx, d, &o, &lo);
    bool same = l && tt_loader_seek(l, 0, i) == TT_OK && tt_loader_next(l, &b) && b.index[0] == i &&
                b.labels[0] == cifar_label(file, record) && tt_dataset_label(d, i) == b.labels[0];
    for (int p = 0; same && p < 3072; p++)
        same = b.pixels[p] == cifar_pixel(file, record, p % 3, p / 96, p / 3 % 32);
    tt_loader_free(l);
    return same;
}

TEST(cifar_files)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    char folder[600], why[DATASET_WHY] = "";
    cifar images, more;
    snprintf(folder, sizeof folder, "%s", test_folder());
    CHECK_WHY(!cifar_open(ctx, &images, folder, "train", why),
              "holds no data_batch_1.bin to data_batch_5.bin");
    cifar_write(folder, 3, 4);
    cifar_write(folder, 1, 12);
    CHECK_WHY(!cifar_open(ctx, &images, folder, "test", why), "holds no test_batch.bin");
    cifar_write(folder, 6, 7);
    tt_dataset *train = cifar_open(ctx, &images, folder, "train", why),
               *test = cifar_open(ctx, &more, folder, "test", why);
    REQUIRE(train && test);
    CHECK(tt_dataset_count(train) == 16 && tt_dataset_count(test) == 7 && tt_dataset_classes(train) == 10);
    CHECK(strcmp(tt_dataset_class_name(train, 0), "airplane") == 0 &&
          strcmp(tt_dataset_class_name(test, 9), "truck") == 0);
    for (int i = 0; i < 16; i++) CHECK(cifar_is(ctx, train, i, i < 12 ? 1 : 3, i < 12 ? i : i - 12));
    for (int i = 0; i < 7; i++) CHECK(cifar_is(ctx, test, i, 6, i));
    size_t bytes = 1;
    CHECK(tt_dataset_label(train, 16) == -1 && strcmp(tt_dataset_text(train, 0, &bytes), "") == 0 &&
          bytes == 0 && !tt_dataset_text(train, 16, NULL));
    tt_dataset_free(train);
    tt_dataset_free(test);
    cifar_free(&images);
    cifar_free(&more);

    static const char *const names = "a b\r\nc\r\nd\r\ne\r\nf\r\ng\r\nh\r\ni\r\nj\r\nk\r\n\r\n";
    const char *meta = test_path(folder, "batches.meta.txt");
    char path[700];
    snprintf(path, sizeof path, "%s", meta);
    test_write(path, names, strlen(names));
    test = cifar_open(ctx, &images, folder, "test", why);
    REQUIRE(test);
    CHECK(strcmp(tt_dataset_class_name(test, 0), "a b") == 0 &&
          strcmp(tt_dataset_class_name(test, 9), "k") == 0);
    tt_dataset_free(test);
    cifar_free(&images);
    test_write(path, names, 5);
    CHECK_WHY(!cifar_open(ctx, &images, folder, "test" , why), "batches.meta.txt' has 1 names");
    test_write(path, "a\nb\nc\nd\ne\nf\ng\nh\ni\nj\nk", 21);
    CHECK_WHY(!cifar_open(ctx, &images, folder, "test", why), "has 11 names");
    remove(path);

    CHECK_WHY(!cifar_open(ctx, &images, folder, "dev", why), "no split 'dev'");
    CHECK(!cifar_open(ctx, &images, folder, NULL, why));
    CHECK_WHY(!cifar_open(ctx, &images, "/nonexistent", "test", why),
              "the folder '/nonexistent' holds no test_batch");

    uint8_t *record = (uint8_t *)calloc(3, 3073);
    static const int sizes[] = {0, 1, 3072, 3074, 2 * 3073 + 100};
    snprintf(path, sizeof path, "%s", test_path(folder, "test_batch.bin"));
    for (int i = 0; i < TEST_COUNT(sizes); i++) {
        char where[64];
        test_write(path, record, (size_t)sizes[i]);
        CHECK_WHY(!cifar_open(ctx, &images, folder, "test", why), "test_batch.bin' has ");
        snprintf(where, sizeof where, "breaks off at byte %d", sizes[i] / 3073 * 3073);
        CHECK(strstr(why, where));
    }
    record[2 * 3073] = 10;
    test_write(path, record, 3 * 3073);
    CHECK_WHY(!cifar_open(ctx, &images, folder, "test", why),
              "test_batch.bin', byte 6146: the label is 10, but CIFAR-10 has labels 0 to 9");
    free(record);
    TEST_CLOSE(ctx, &a);
}

TEST(cifar_split) /* the split takes an equal share of each class; the seed chooses the images */
{
    char folder[600];
    int different = 0, previous[20];
    snprintf(folder, sizeof folder, "%s", test_folder());
    cifar_write(folder, 2, 40); /* four records of each class */
    cifar_write(folder, 5, 20); /* two records of each class */
    for (int run = 0; run < 4; run++) { /* the runs have the seeds 1, 1, 2, 3 */
        test_allocator a;
        tt_context_options o = test_options(&a);
        o.seed = run ? (uint64_t)run : 1;
        tt_context *ctx = tt_open(&o);
        char why[DATASET_WHY];
        cifar images;
        tt_dataset *all = cifar_open(ctx, &images, folder, "train", why),
                   *d = all ? tt_dataset_split(all, 20) : NULL;
        int of_class[10] = {0}, changed = 0, place;
        REQUIRE(d);
        CHECK(tt_dataset_count(d) == 20 && tt_dataset_count(all) == 40);
        tt_dataset_free(all); /* the dataset `images` still has its pixels */
        for (int i = 0; i < 20; i++) {
            place = 0;
            while (place < 60 && !cifar_is(ctx, d, i, place < 40 ? 2 : 5, place < 40 ? place : place - 40))
                place++;
            REQUIRE(place < 60);
            of_class[tt_dataset_label(d, i)]++;
            changed += run && previous[i] != place;
            previous[i] = place;
        }
        if (run == 1) CHECK(changed == 0);
        else different += changed;
        for (int c = 0; c < 10; c++) CHECK(of_class[c] == 2);

        int first[20], seen[60] = {0};
        memcpy(first, previous, sizeof first);
        tt_dataset *part = tt_dataset_split(d, 5); /* keeps its images when d is freed */
        REQUIRE(part);
        CHECK(tt_dataset_count(part) == 5 && tt_dataset_count(d) == 15 && tt_dataset_classes(part) == 10 &&
              strcmp(tt_dataset_class_name(part, 3), "cat") == 0);
        for (int k = 0; k < 20; k++)
            for (int i = 0; i < 20; i++)
                seen[first[i]] += cifar_is(ctx, k < 5 ? part : d, k < 5 ? k : k - 5, first[i] < 40 ? 2 : 5,
                                           first[i] < 40 ? first[i] : first[i] - 40);
        for (int i = 0; i < 20; i++) CHECK(seen[first[i]] == 1);
        place = -1;
        for (int i = 0; i < 20; i++)
            if (cifar_is(ctx, part, 0, first[i] < 40 ? 2 : 5, first[i] < 40 ? first[i] : first[i] - 40))
                place = first[i];
        tt_dataset_free(d);
        CHECK(place >= 0 && cifar_is(ctx, part, 0, place < 40 ? 2 : 5, place < 40 ? place : place - 40));
        CHECK(!tt_dataset_split(part, 5));
        CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "n is 5, but must be 1 to 4, because the dataset has 5 images");
        tt_dataset_free(part);
        cifar_free(&images);
        TEST_CLOSE(ctx, &a);
    }
    CHECK(different > 10);
}

/* ------------------------------------------------------------------------------------------------ sources */

/* A source that draws images and counts its calls. Image i has the class `i % 3`. */
typedef struct drawing {
    pthread_mutex_t mutex;
    int height, width;     /* size; 0: each image has another size */
    int channels;          /* number of channels; 0: 1, 3, 4, 1, ... */
    int fail_at;           /* the images fail_at and fail_at + 1 fail; -1: none fails */
    const tt_image *instead; /* returned in place of a failing image, if not NULL */
    bool meet;             /* a read waits until a second read is in flight */
    int slow;              /* min microseconds of a read; the max is seven times as long */
    long reads, released, inside, most_inside;
    int labels[512];
} drawing;

/* Returns a pixel, never 0, which is the value of padding. */
static uint8_t draw(int64_t i, int y, int x, int c)
{
    return (uint8_t)(1 + (i * 37 + y * 20 + x * 11 * (c + 1) + c * 60) % 255);
}

static const char *drawing_read(void *user, int64_t i, tt_image *image)
{
    drawing *s = (drawing *)user;
    double until = tt__seconds() + 20;
    bool alone, fails;
    pthread_mutex_lock(&s->mutex);
    s->reads++;
    fails = i == s->fail_at || (s->fail_at >= 0 && i == s->fail_at + 1);
    if (++s->inside > s->most_inside) s->most_inside = s->inside;
    do { /* once two reads have met, later reads do not wait */
        alone = s->meet && s->most_inside < 2 && tt__seconds() < until;
        pthread_mutex_unlock(&s->mutex);
        if (alone) usleep(100);
        pthread_mutex_lock(&s->mutex);
    } while (alone);
    s->inside--;
    if (fails && !s->instead) s->released++; /* a failed read has no image to release */
    pthread_mutex_unlock(&s->mutex);
    if (s->slow) usleep((useconds_t)(s->slow * (1 + i % 7)));
    if (fails && !s->instead) return "not a picture";
    int h = s->height ? s->height : 9 + (int)(i * 7 % 13), w = s->width ? s->width : 8 + (int)(i * 5 % 17),
        c = s->channels ? s->channels
            : i % 3 == 2 ? 4
            : i % 3 == 1 ? 3
            : 1;
    uint8_t *pixels = (uint8_t *)malloc((size_t)(h * w * c));
    for (int p = 0; p < h * w * c; p++) pixels[p] = draw(i, p / c / w, p / c % w, p % c);
    image->pixels = pixels;
    image->height = h;
    image->width = w;
    image->channels = c;
    if (fails) {
        free(pixels);
        *image = *s->instead;
    }
    return NULL;
}

static void drawing_release(void *user, tt_image *image)
{
    drawing *s = (drawing *)user;
    pthread_mutex_lock(&s->mutex);
    s->released++;
    pthread_mutex_unlock(&s->mutex);
    if (!s->instead || image->pixels != s->instead->pixels) free((void *)(uintptr_t)image->pixels);
}

static const char *drawing_name(void *user, int64_t i)
{
    static char name[32];
    (void)user;
    snprintf(name, sizeof name, "drawing-%d.png", (int)i);
    return name;
}

static const char *const drawing_classes[] = {"red", "green", "blue"};

static tt_image_source drawing_source(drawing *s, int n)
{
    tt_image_source source;
    memset(s, 0, sizeof *s);
    memset(&source, 0, sizeof source);
    pthread_mutex_init(&s->mutex, NULL);
    s->fail_at = -1;
    for (int i = 0; i < n; i++) s->labels[i] = i % 3;
    source.count = n;
    source.labels = s->labels;
    source.class_names = drawing_classes;
    source.classes = 3;
    source.read = drawing_read;
    source.release = drawing_release;
    source.name = drawing_name;
    source.user = s;
    return source;
}

static long drawing_counter(drawing *s, const long *counter)
{
    pthread_mutex_lock(&s->mutex);
    long n = *counter;
    pthread_mutex_unlock(&s->mutex);
    return n;
}

TEST(image_dataset)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    drawing s;
    tt_image_source source = drawing_source(&s, 30), bad;
    tt_dataset *d = tt_dataset_images(ctx, &source);
    REQUIRE(d);
    for (int i = 0; i < 30; i++) s.labels[i] = -5; /* the dataset has its own copy of the labels */
    CHECK(tt_dataset_count(d) == 30 && tt_dataset_classes(d) == 3 &&
          strcmp(tt_dataset_class_name(d, 2), "blue") == 0 && !tt_dataset_class_name(d, 3));
    CHECK(tt_dataset_label(d, 4) == 1 && tt_dataset_label(d, 29) == 2 && tt_dataset_label(d, 30) == -1 &&
          strcmp(tt_dataset_text(d, 3, NULL), "") == 0);
    tt_dataset *part = tt_dataset_split(d, 6);
    REQUIRE(part);
    int of_class[3] = {0};
    for (int i = 0; i < 6; i++) of_class[tt_dataset_label(part, i)]++;
    CHECK(tt_dataset_count(d) == 24 && of_class[0] == 2 && of_class[1] == 2 && of_class[2] == 2);

    tt_tokenizer *k = tt_tokenizer_open(ctx, TEST_GOLDEN("vocab_uncased.txt"), true);
    CHECK(!tt_loader_new(ctx, d, k, NULL));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "the dataset holds images: use tt_image_loader_new");
    static const char table[] = "text\tlabel\na\tx\nb\ty\n";
    const char *path = test_write(test_path(test_folder(), "t.tsv"), table, sizeof table - 1);
    tt_dataset *texts = tt_dataset_table(ctx, path, NULL, NULL, 0, NULL);
    REQUIRE(k && texts);
    tt_image_options o = tt_image_options_default(8, 8);
    CHECK(!tt_image_loader_new(ctx, texts, &o, NULL));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "the dataset holds texts: use tt_loader_new");
    CHECK(!tt_image_loader_new(ctx, d, NULL, NULL));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "image options are NULL");
    tt_loader *l = tt_loader_new(ctx, texts, k, NULL);
    tt_batch b;
    CHECK(l && tt_loader_next(l, &b) && b.ids && !b.pixels);
    tt_loader_free(l);
    tt_dataset_free(texts);
    tt_tokenizer_free(k);

    for (int i = 0; i < 6; i++) {
        bad = source;
        if (i == 0) bad.count = 0;
        if (i == 1) bad.classes = 0;
        if (i == 2) bad.labels = NULL;
        if (i == 3) bad.class_names = NULL;
        if (i == 4) bad.read = NULL;
        if (i == 5) bad.count = (int64_t)INT_MAX + 1;
        CHECK(!tt_dataset_images(ctx, &bad));
        CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "expected at least one image and one class");
    }
    for (int i = 0; i < 30; i++) s.labels[i] = i == 17 ? 3 : 0;
    CHECK(!tt_dataset_images(ctx, &source));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "image 17 has label 3, but labels must be 0 to 2");
    s.labels[17] = -1;
    CHECK(!tt_dataset_images(ctx, &source));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "image 17 has label -1");
    const char *const holes[] = {"red", NULL, "blue"};
    source.class_names = holes;
    CHECK(!tt_dataset_images(ctx, &source));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "class 1 of 3 is NULL");
    const char *const latin1[] = {"red", "blue", "br\xFBl\xE9"};
    source.class_names = latin1;
    CHECK(!tt_dataset_images(ctx, &source));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT,
                "the name of class 2 of 3, 'br', is followed by the byte 0xfb, which is not valid UTF-8");
    tt_dataset_free(part);
    tt_dataset_free(d);
    TEST_CLOSE(ctx, &a);
}

/* ------------------------------------------------------------------------------------------------- loader */

/* The images of an epoch in the order in which a loader gave them. pixels: a hash of each image. */
typedef struct epoch_log {
    int micro, steps, seqs;
    int64_t index[512];
    int micro_of[512];
    uint64_t pixels[512];
} epoch_log;

/* Reads to the end of the epoch into *log. */
static void read_epoch(tt_loader *l, const tt_dataset *d, size_t bytes, int64_t epoch, int64_t step,
                       epoch_log *log)
{
    tt_batch b;
    memset(log, 0, sizeof *log);
    CHECK(tt_loader_seek(l, epoch, step) == TT_OK);
    while (tt_loader_next(l, &b)) {
        CHECK(b.seqs >= 1 && b.seqs <= tt_loader_max_seqs(l) && b.rows == 0 && !b.ids && !b.positions &&
              !b.types && !b.seq_start);
        for (int i = 0; i < b.seqs; i++) {
            uint64_t hash = 14695981039346656037u; /* FNV-1a */
            for (size_t p = 0; p < bytes; p++)
                hash = (hash ^ b.pixels[(size_t)i * bytes + p]) * 1099511628211u;
            CHECK(b.labels[i] == tt_dataset_label(d, b.index[i]));
            if (!CHECK(log->seqs < 512)) return;
            log->index[log->seqs] = b.index[i];
            log->pixels[log->seqs] = hash;
            log->micro_of[log->seqs++] = log->micro;
        }
        log->micro++;
        log->steps += b.last_of_step;
    }
    CHECK(tt_loader_status(l) == TT_OK && !tt_loader_next(l, &b));
}

TEST(image_loader_is_the_same_for_any_number_of_threads)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    drawing s;
    tt_image_source source = drawing_source(&s, 53);
    tt_dataset *d = tt_dataset_images(ctx, &source);
    tt_image_options image = tt_image_options_default(9, 10);
    REQUIRE(d);
    image.resize_height = 11;
    image.resize_width = 12;
    image.pad = 2;
    image.random_crop = image.flip = true;
    epoch_log *first = (epoch_log *)malloc(5 * sizeof *first), *log = first + 1, *second = first + 2,
              *rest = first + 3, *again = first + 4;
    /* columns: batch, accumulate, drop_last, shuffle, groups */
    static const int configurations[][5] = {
        {16, 1, 0, 1, 1}, {16, 4, 0, 1, 1}, {10, 3, 1, 1, 1}, {1, 1, 0, 0, 1}, {7, 7, 1, 0, 1},
        {100, 3, 0, 1, 1}, {53, 2, 1, 0, 1}, {16, 1, 0, 1, 4}, {17, 2, 0, 1, 3}, {16, 2, 0, 0, 8},
        {24, 1, 0, 1, 2}, {100, 3, 0, 1, 4}};
    for (int c = 0; c < TEST_COUNT(configurations); c++) {
        tt_loader_options o = tt_loader_options_default();
        o.batch = configurations[c][0];
        o.accumulate = configurations[c][1];
        o.drop_last = configurations[c][2] != 0;
        o.shuffle = configurations[c][3] != 0;
        const int groups = o.parallel.groups = configurations[c][4];
        for (int threads = 0; threads < 5; threads++) {
            o.threads = threads;
            o.parallel.data = threads % 2 ? groups : 0; /* results are equal for any number of ranks */
            tt_loader *l = tt_image_loader_new(ctx, d, &image, &o);
            REQUIRE(l);
            int steps = o.drop_last ? 53 / o.batch : (53 + o.batch - 1) / o.batch,
                used = o.drop_last ? steps * o.batch : 53, seen[53] = {0};
            int max = (o.batch + o.accumulate * groups - 1) / (o.accumulate * groups), in_step = 0;
            int micro = 0;
            CHECK(tt_loader_steps(l) == steps && tt_loader_max_seqs(l) == (max < 53 ? max : 53) &&
                  tt_loader_max_tokens(l) == 0);
            read_epoch(l, d, 270, 0, 0, log);
            CHECK(log->steps == steps && log->seqs == used);
            for (int i = 0; i < used; i++) { /* each image comes once; each micro-batch is full, unless a
                                                step ends with it */
                CHECK(!seen[log->index[i]]++);
                if (!o.shuffle) CHECK(log->index[i] == i);
                if (groups > 1) continue;
                if (i && i % o.batch == 0) { micro++; in_step = 0; }
                else if (in_step == max) { micro++; in_step = 0; }
                CHECK(log->micro_of[i] == micro);
                in_step++;
            }
            /* micro-batches of a step have similar sizes, and each group has equally many micro-batches */
            for (int at = 0; at < used && groups > 1; at += o.batch) {
                const int n = used - at < o.batch ? used - at : o.batch, from = log->micro_of[at];
                const int whole = groups * ((n + groups * max - 1) / (groups * max));
                const int parts = log->micro_of[at + n - 1] - from + 1;
                int size[53] = {0};
                CHECK(parts == (whole < n ? whole : n) && (at == 0 || log->micro_of[at - 1] == from - 1));
                for (int i = at; i < at + n; i++) size[log->micro_of[i] - from]++;
                for (int m = 0; m < parts; m++) CHECK(size[m] == n / parts || size[m] == (n - 1) / parts + 1);
            }
            if (!threads) memcpy(first, log, sizeof *log);
            CHECK(memcmp(first, log, sizeof *log) == 0);
            read_epoch(l, d, 270, 1, 0, second);
            read_epoch(l, d, 270, 0, 0, again);
            CHECK(memcmp(first, again, sizeof *again) == 0 &&
                  memcmp(first->pixels, second->pixels, sizeof second->pixels) != 0);
            CHECK((memcmp(first->index, second->index, sizeof second->index) != 0) == o.shuffle);
            /* after a seek to a step, the loader gives the images from that step on, in the same order */
            for (int step = steps; step >= 0; step -= 2) {
                int skip = step * o.batch < used ? step * o.batch : used;
                read_epoch(l, d, 270, 1, step, rest);
                CHECK(rest->seqs == used - skip && rest->steps == steps - step);
                const size_t n = (size_t)rest->seqs;
                CHECK(memcmp(rest->index, second->index + skip, n * sizeof *rest->index) == 0);
                CHECK(memcmp(rest->pixels, second->pixels + skip, n * sizeof *rest->pixels) == 0);
            }
            CHECK(tt_loader_waited(l) >= 0);
            CHECK(tt_loader_seek(l, 0, steps + 1) == TT_ERR_ARGUMENT &&
                  tt_loader_seek(l, -1, 0) == TT_ERR_ARGUMENT);
            tt_loader_free(l);
        }
    }
    CHECK(s.reads == s.released);
    free(first);
    tt_dataset_free(d);
    TEST_CLOSE(ctx, &a);
}

TEST(image_loader_seeds) /* another seed gives another order and other crops */
{
    test_allocator a;
    tt_context_options o = test_options(&a);
    drawing s;
    tt_image_source source = drawing_source(&s, 40);
    epoch_log *log = (epoch_log *)malloc(2 * sizeof *log);
    tt_image_options image = tt_image_options_default(8, 8);
    tt_loader_options lo = tt_loader_options_default();
    image.random_crop = true;
    image.pad = 1;
    for (int shuffle = 0; shuffle < 2; shuffle++) {
        for (int k = 0; k < 2; k++) {
            o.seed = 5 + (uint64_t)k;
            lo.shuffle = shuffle != 0;
            tt_context *ctx = tt_open(&o);
            tt_dataset *d = tt_dataset_images(ctx, &source);
            tt_loader *l = d ? tt_image_loader_new(ctx, d, &image, &lo) : NULL;
            REQUIRE(l);
            read_epoch(l, d, 192, 0, 0, &log[k]);
            tt_loader_free(l);
            tt_dataset_free(d);
            tt_close(ctx);
        }
        CHECK((memcmp(log[0].index, log[1].index, sizeof log->index) != 0) == lo.shuffle &&
              memcmp(log[0].pixels, log[1].pixels, sizeof log->pixels) != 0);
    }
    CHECK(a.live == 0);
    free(log);
}

/* Returns whether `have` is the resized image (H, W, channels) padded with zeros, cropped from (top, left)
   on, and mirrored if `mirror`. */
static bool is_crop(const uint8_t *resized, int H, int W, const tt_image_options *o, int top, int left,
                    bool mirror, const uint8_t *have)
{
    for (int y = 0; y < o->height; y++)
        for (int x = 0; x < o->width; x++)
            for (int c = 0; c < o->channels; c++) {
                int v = y + top - o->pad, u = (mirror ? o->width - 1 - x : x) + left - o->pad;
                int want = v < 0 || v >= H || u < 0 || u >= W ? 0 : resized[(v * W + u) * o->channels + c];
                if (have[(y * o->width + x) * o->channels + c] != want) return false;
            }
    return true;
}

/* Every result is exactly one crop of the image. All crops occur, both mirrored and not mirrored. */
TEST(image_loader_transforms)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    enum { N = 50, HEIGHT = 12, WIDTH = 10 };
    static const struct {
        int channels, to, height, width, resize_height, resize_width, pad;
        bool random, flip;
    } cases[] = {{3, 3, 12, 10, 0, 0, 0, false, false}, {3, 3, 9, 7, 0, 0, 0, false, false},
                 {3, 3, 9, 7, 0, 0, 2, true, true},     {1, 3, 12, 10, 0, 0, 2, true, false},
                 {4, 3, 7, 8, 0, 0, 0, true, true},     {3, 3, 17, 20, 20, 24, 0, true, true},
                 {4, 3, 7, 6, 7, 6, 1, false, true},    {1, 1, 9, 9, 6, 5, 4, true, true},
                 {4, 4, 5, 5, 6, 7, 0, true, true},     {2, 2, 14, 12, 12, 10, 2, true, false},
                 {3, 3, 3, 3, 2, 2, 3, true, true},     {3, 3, 16, 15, 0, 0, 3, false, true}};
    for (int n = 0; n < TEST_COUNT(cases); n++) {
        drawing s;
        tt_image_source source = drawing_source(&s, N);
        tt_image_options o = tt_image_options_default(cases[n].height, cases[n].width);
        tt_loader_options lo = tt_loader_options_default();
        tt_batch b;
        s.height = HEIGHT;
        s.width = WIDTH;
        s.channels = cases[n].channels;
        o.channels = cases[n].to;
        o.resize_height = cases[n].resize_height;
        o.resize_width = cases[n].resize_width;
        o.pad = cases[n].pad;
        o.random_crop = cases[n].random;
        o.flip = cases[n].flip;
        int c = o.channels, H = o.resize_height ? o.resize_height : HEIGHT,
            W = o.resize_width ? o.resize_width : WIDTH;
        int tops = H + 2 * o.pad - o.height + 1, lefts = W + 2 * o.pad - o.width + 1;
        size_t bytes = (size_t)(o.height * o.width * c), resized_bytes = (size_t)(H * W * c);
        uint8_t *resized = (uint8_t *)malloc(N * resized_bytes),
                *came = (uint8_t *)calloc((size_t)(tops * lefts), 2), pixels[HEIGHT * WIDTH * 4];
        for (int i = 0; i < N; i++) { /* makes the expected image; like the loader, converts channels
                                         before the resize */
            tt_image image = {pixels, HEIGHT, WIDTH, c};
            for (int p = 0; p < HEIGHT * WIDTH * c; p++)
                pixels[p] = draw(i, p / c / WIDTH, p / c % WIDTH, s.channels == 1 ? 0 : p % c);
            CHECK(tt_image_resize(ctx, &image, H, W, resized + (size_t)i * resized_bytes) == TT_OK);
        }
        tt_dataset *d = tt_dataset_images(ctx, &source);
        tt_loader *l = d ? tt_image_loader_new(ctx, d, &o, &lo) : NULL;
        REQUIRE(l);
        int images = 0, mirrored = 0, places = 0, ambiguous = 0;
        for (int epoch = 0; epoch < (o.random_crop || o.flip ? 40 : 2); epoch++) {
            CHECK(tt_loader_seek(l, epoch, 0) == TT_OK);
            while (tt_loader_next(l, &b))
                for (int i = 0; i < b.seqs; i++, images++) {
                    int found = 0;
                    for (int place = 0; place < 2 * tops * lefts; place++) {
                        int top = place / 2 / lefts, left = place / 2 % lefts;
                        if (!o.random_crop && (top != (tops - 1) / 2 || left != (lefts - 1) / 2)) continue;
                        if (!o.flip && place % 2) continue;
                        if (!is_crop(resized + (size_t)b.index[i] * resized_bytes, H, W, &o, top, left,
                                     place % 2, b.pixels + (size_t)i * bytes))
                            continue;
                        mirrored += place % 2;
                        came[place] = 1;
                        found++;
                    }
                    CHECK(found >= 1);
                    ambiguous += found > 1;
                }
            CHECK(tt_loader_status(l) == TT_OK);
        }
        for (int place = 0; place < 2 * tops * lefts; place++) places += came[place];
        CHECK(places == (o.random_crop ? tops * lefts : 1) * (o.flip ? 2 : 1));
        if (o.pad < o.height) { /* with more padding a result may be all padding */
            CHECK(ambiguous == 0);
            CHECK(o.flip ? mirrored > images * 2 / 5 && mirrored < images * 3 / 5 : mirrored == 0);
        }
        tt_loader_free(l);
        tt_dataset_free(d);
        CHECK(s.reads == s.released);
        free(resized);
        free(came);
    }
    TEST_CLOSE(ctx, &a);
}

TEST(image_loader_option_errors)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    char folder[600];
    drawing s;
    tt_image_source source = drawing_source(&s, 20);
    snprintf(folder, sizeof folder, "%s", test_folder());
    cifar_write(folder, 6, 20);
    cifar images;
    char why[DATASET_WHY];
    tt_dataset *d = tt_dataset_images(ctx, &source), *sized = cifar_open(ctx, &images, folder, "test", why);
    REQUIRE(d && sized);
    static const struct {
        int height, width, channels, resize_height, resize_width, pad;
        const char *error;
    } bad[] = {{0, 8, 3, 0, 0, 0, "the height is 0, the width 8"},
               {8, 65536, 3, 0, 0, 0, "the height is 8, the width 65536"},
               {8, 8, 0, 0, 0, 0, "channels 0"},
               {8, 8, 5, 0, 0, 0, "channels 5"},
               {8, 8, 3, 9, 0, 0, "resize_height is 9 and resize_width 0"},
               {8, 8, 3, 0, 9, 0, "resize_height is 0 and resize_width 9"},
               {8, 8, 3, -1, -1, 0, "resize_height is -1"},
               {8, 8, 3, 0, 0, -1, "pad is -1"},
               {8, 8, 3, 0, 0, 65536, "pad is 65536"},
               {12, 8, 3, 9, 9, 1, "12 x 8 pixels cannot be cropped out of 9 x 9 pixels with a pad of 1"},
               {8, 10, 3, 9, 9, 0, "8 x 10 pixels cannot be cropped out of 9 x 9 pixels with a pad of 0"}};
    for (int i = 0; i < TEST_COUNT(bad); i++) {
        tt_image_options o = tt_image_options_default(bad[i].height, bad[i].width);
        o.channels = bad[i].channels;
        o.resize_height = bad[i].resize_height;
        o.resize_width = bad[i].resize_width;
        o.pad = bad[i].pad;
        CHECK(!tt_image_loader_new(ctx, d, &o, NULL));
        CHECK_ERROR(ctx, TT_ERR_ARGUMENT, bad[i].error);
    }
    /* Tests options that the table above does not set: resize_shortest and resample. */
    static const struct { int shortest, height, resample; const char *error; } other[] = {
        {-1, 0, 2, "resize_shortest is -1"}, {65536, 0, 2, "resize_shortest is 65536"},
        {9, 9, 2, "resize_shortest is 9 and resize_height 9"}, {0, 0, 4, "resample is 4"},
        {0, 0, -1, "resample is -1"}};
    for (int i = 0; i < TEST_COUNT(other); i++) {
        tt_image_options o = tt_image_options_default(8, 8);
        const uint8_t pixel[3] = {0, 0, 0};
        const tt_image image = {pixel, 1, 1, 3};
        uint8_t to[8 * 8 * 3];
        o.resize_shortest = other[i].shortest;
        o.resize_height = o.resize_width = other[i].height;
        o.resample = (tt_resample)other[i].resample;
        CHECK(!tt_image_loader_new(ctx, d, &o, NULL));
        CHECK_ERROR(ctx, TT_ERR_ARGUMENT, other[i].error);
        CHECK(tt_image_prepare(ctx, &image, &o, to) == TT_ERR_ARGUMENT);
    }
    {
        tt_image_options o = tt_image_options_default(8, 8);
        const uint8_t pixels[300] = {0};
        const tt_image image = {pixels, 1, 100, 3};
        uint8_t to[8 * 8 * 3];
        o.resize_shortest = 1000;
        CHECK(tt_image_prepare(ctx, &image, &o, to) == TT_ERR_ARGUMENT);
        CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "a shorter side of 1000 get a longer side of 100000");
    }
    /* Sizes and channels of CIFAR-10 are known in advance. */
    tt_image_options o = tt_image_options_default(33, 32);
    CHECK(!tt_image_loader_new(ctx, sized, &o, NULL));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "cannot be cropped out of 32 x 32");
    o = tt_image_options_default(32, 32);
    o.channels = 1;
    CHECK(!tt_image_loader_new(ctx, sized, &o, NULL));
    CHECK_ERROR(ctx, TT_ERR_ARGUMENT, "3 channels cannot be converted to 1");
    static const struct { int batch, accumulate, threads; bool drop_last; const char *error; } wrong[] = {
        {0, 1, 1, false, "batch = 0"}, {4, 5, 1, false, "accumulate = 5"}, {4, 1, 65, false, "threads is 65"},
        {4, 1, -1, false, "threads is -1"}, {21, 1, 1, true, "20 images are fewer than batch"}};
    for (int i = 0; i < TEST_COUNT(wrong); i++) {
        tt_loader_options lo = tt_loader_options_default();
        lo.max_length = lo.window = -7; /* unused for images */
        lo.batch = wrong[i].batch;
        lo.accumulate = wrong[i].accumulate;
        lo.threads = wrong[i].threads;
        lo.drop_last = wrong[i].drop_last;
        o.channels = 3;
        CHECK(!tt_image_loader_new(ctx, sized, &o, &lo));
        CHECK_ERROR(ctx, TT_ERR_ARGUMENT, wrong[i].error);
    }
    tt_dataset_free(sized);
    cifar_free(&images);
    tt_dataset_free(d);
    TEST_CLOSE(ctx, &a);
}

/* The loader gives the micro-batches before the failing image, and then an error that names the image. A seek
   past the image succeeds. */
TEST(image_loader_failing_source)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    static const uint8_t pixels[4] = {1, 2, 3, 4};
    static const struct { tt_image instead; bool named; tt_status status; const char *error; } cases[] = {
        {{NULL, 0, 0, 0}, true, TT_ERR_FILE, "loader: image 'drawing-23.png': not a picture"},
        {{NULL, 0, 0, 0}, false, TT_ERR_FILE, "loader: image 23: not a picture"},
        {{NULL, 9, 9, 3}, true, TT_ERR_ARGUMENT,
         "'drawing-23.png': the image has 9 x 9 pixels (NULL) and 3 channels"},
        {{pixels, 0, 1, 3}, true, TT_ERR_ARGUMENT,
         "'drawing-23.png': the image has 0 x 1 pixels and 3 channels"},
        {{pixels, 1, 1, 7}, true, TT_ERR_ARGUMENT,
         "'drawing-23.png': the image has 1 x 1 pixels and 7 channels"},
        {{pixels, 1, 1, 3}, true, TT_ERR_ARGUMENT,
         "'drawing-23.png': 8 x 8 pixels cannot be cropped out of 1 x 1"},
        {{pixels, 1, 1, 2}, false, TT_ERR_ARGUMENT,
         "image 23: 2 channels cannot be converted to 3: set channels"}};
    for (int n = 0; n < TEST_COUNT(cases); n++)
        for (int threads = 0; threads < 4; threads++) {
            drawing s;
            tt_image_source source = drawing_source(&s, 60);
            tt_image_options image = tt_image_options_default(8, 8);
            tt_loader_options o = tt_loader_options_default();
            tt_batch b;
            int seqs = 0;
            if (!cases[n].named) source.name = NULL;
            o.batch = 10;
            o.accumulate = 2;
            o.shuffle = false;
            o.threads = threads;
            s.fail_at = 23;
            if (cases[n].instead.height || cases[n].instead.channels) s.instead = &cases[n].instead;
            tt_dataset *d = tt_dataset_images(ctx, &source);
            tt_loader *l = d ? tt_image_loader_new(ctx, d, &image, &o) : NULL;
            REQUIRE(l);
            while (tt_loader_next(l, &b)) seqs += b.seqs;
            CHECK(seqs == 20);
            CHECK_ERROR(ctx, cases[n].status, cases[n].error);
            /* a further call gives the error again */
            CHECK(tt_loader_status(l) == cases[n].status && !tt_loader_next(l, &b));
            CHECK_ERROR(ctx, cases[n].status, cases[n].error);
            CHECK(tt_loader_seek(l, 0, 3) == TT_OK);
            while (tt_loader_next(l, &b)) seqs += b.seqs;
            CHECK(seqs == 50 && tt_loader_status(l) == TT_OK);
            CHECK(tt_loader_seek(l, 0, 2) == TT_OK && !tt_loader_next(l, &b));
            CHECK_ERROR(ctx, cases[n].status, cases[n].error);
            pthread_mutex_lock(&s.mutex);
            s.fail_at = -1; /* the source reads this image now, and a seek back reads the image again */
            pthread_mutex_unlock(&s.mutex);
            CHECK(tt_loader_seek(l, 0, 2) == TT_OK);
            for (seqs = 20; tt_loader_next(l, &b);) seqs += b.seqs;
            CHECK(seqs == 60 && tt_loader_status(l) == TT_OK);
            tt_loader_free(l);
            CHECK(s.reads == s.released);
            tt_dataset_free(d);
        }
    TEST_CLOSE(ctx, &a);
}

TEST(image_loader_works_ahead_on_several_threads)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    drawing s;
    tt_image_source source = drawing_source(&s, 200);
    tt_image_options image = tt_image_options_default(8, 8);
    tt_loader_options o = tt_loader_options_default();
    tt_batch b;
    s.meet = true; /* the first read returns after another has begun */
    o.batch = 8;
    o.threads = 4;
    tt_dataset *d = tt_dataset_images(ctx, &source);
    tt_loader *l = d ? tt_image_loader_new(ctx, d, &image, &o) : NULL;
    REQUIRE(l);
    double until = tt__seconds() + 20;
    /* The loader prepares three micro-batches before the first call. */
    while (drawing_counter(&s, &s.released) < 24 && tt__seconds() < until) usleep(100);
    CHECK(drawing_counter(&s, &s.released) == 24 && s.most_inside >= 2);
    CHECK(tt_loader_seek(l, 0, 0) == TT_OK); /* no image is read a second time */
    for (int step = 0; step < 5; step++) {
        uint64_t sum = 0, later = 0;
        CHECK(tt_loader_next(l, &b));
        for (int p = 0; p < b.seqs * 192; p++) sum = sum * 31 + b.pixels[p];
        until = tt__seconds() + 20;
        while (drawing_counter(&s, &s.released) < 24 + 8 * step && tt__seconds() < until) usleep(100);
        for (int p = 0; p < b.seqs * 192; p++) later = later * 31 + b.pixels[p];
        /* The loader has read ahead, and has not changed the pixels of this batch. */
        CHECK(drawing_counter(&s, &s.reads) == 24 + 8 * step && sum == later);
    }
    tt_loader_free(l);
    tt_dataset_free(d);
    TEST_CLOSE(ctx, &a);
}

TEST(image_loader_seeks_while_its_threads_work)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    drawing s;
    tt_image_source source = drawing_source(&s, 70);
    tt_image_options image = tt_image_options_default(8, 8);
    tt_loader_options o = tt_loader_options_default();
    tt_dataset *d = tt_dataset_images(ctx, &source);
    tt_batch b, c;
    uint64_t seed = 3;
    o.batch = 6;
    o.accumulate = 2;
    o.threads = 0;
    image.random_crop = true;
    s.slow = 20;
    tt_loader *plain = d ? tt_image_loader_new(ctx, d, &image, &o) : NULL;
    o.threads = 4;
    tt_loader *l = plain ? tt_image_loader_new(ctx, d, &image, &o) : NULL;
    REQUIRE(l);
    for (int i = 0; i < 200; i++) {
        int64_t epoch = test_random(&seed) % 2, step = test_random(&seed) % 12;
        CHECK(tt_loader_seek(l, epoch, step) == TT_OK && tt_loader_seek(plain, epoch, step) == TT_OK);
        for (uint32_t n = test_random(&seed) % 4; n; n--) {
            bool more = tt_loader_next(plain, &c);
            CHECK(tt_loader_next(l, &b) == more && b.seqs == c.seqs && b.last_of_step == c.last_of_step);
            if (more)
                CHECK(memcmp(b.pixels, c.pixels, (size_t)b.seqs * 192) == 0 &&
                      memcmp(b.index, c.index, (size_t)b.seqs * sizeof *b.index) == 0);
        }
        if (i % 8 == 0) usleep(300);
    }
    tt_loader_free(plain);
    tt_loader_free(l);
    CHECK(s.reads == s.released);
    tt_dataset_free(d);
    TEST_CLOSE(ctx, &a);
}

TEST(image_loader_freed_while_its_threads_work)
{
    test_allocator a;
    tt_context *ctx = test_open(&a);
    drawing s;
    tt_image_source source = drawing_source(&s, 90);
    tt_image_options image = tt_image_options_default(20, 20);
    tt_dataset *d = tt_dataset_images(ctx, &source);
    tt_batch b;
    REQUIRE(d);
    image.resize_height = image.resize_width = 30;
    image.random_crop = image.flip = true;
    for (int i = 0; i < 40; i++) {
        tt_loader_options o = tt_loader_options_default();
        o.threads = 1 + i % 5;
        o.batch = 1 + i % 7 * 4;
        tt_loader *l = tt_image_loader_new(ctx, d, &image, &o);
        REQUIRE(l);
        if (i % 3) CHECK(tt_loader_seek(l, i, i % 3) == TT_OK);
        if (i % 2) CHECK(tt_loader_next(l, &b));
        if (i % 4 == 3)
            CHECK(tt_loader_next(l, &b) && tt_loader_seek(l, i + 1, 1) == TT_OK && tt_loader_next(l, &b));
        tt_loader_free(l);
        CHECK(s.reads == s.released);
    }
    tt_dataset_free(d);
    TEST_CLOSE(ctx, &a);
}

/* ------------------------------------------------------------------------------------------------- faults */

static bool use_everything(tt_context *ctx, const char *folder, drawing *s, const tt_image_source *source)
{
    tt_image_options image = tt_image_options_default(9, 9);
    tt_loader_options o = tt_loader_options_default();
    tt_batch b;
    int seqs = 0;
    o.threads = 2;
    image.resize_height = 10;
    image.resize_width = 11;
    image.channels = 4;
    s->channels = 4;
    cifar images;
    char why[DATASET_WHY];
    memset(&images, 0, sizeof images);
    tt_dataset *d = tt_dataset_images(ctx, source);
    tt_dataset *all = d ? cifar_open(ctx, &images, folder, "train", why) : NULL;
    tt_dataset *part = all ? tt_dataset_split(d, 7) : NULL, *part2 = part ? tt_dataset_split(all, 7) : NULL;
    tt_loader *l = part2 ? tt_image_loader_new(ctx, d, &image, &o) : NULL;
    while (l && tt_loader_next(l, &b)) seqs += b.seqs;
    bool ok = l && tt_loader_status(l) == TT_OK && seqs == 23;
    tt_loader_free(l);
    tt_dataset_free(part2);
    tt_dataset_free(part);
    tt_dataset_free(all);
    cifar_free(&images);
    tt_dataset_free(d);
    return ok;
}

/* Each allocation fails once: an error says so, and nothing leaks or crashes. */
TEST(image_allocation_failures)
{
    char folder[600];
    snprintf(folder, sizeof folder, "%s", test_folder());
    cifar_write(folder, 4, 25);
    bool done = false;
    long n = 1;
    for (; !done && n < 1000; n++) {
        test_allocator a;
        drawing s;
        tt_image_source source = drawing_source(&s, 30);
        tt_context_options o = test_options(&a);
        tt_context *ctx = tt_open(&o);
        REQUIRE(ctx);
        a.fail_at = a.calls + n;
        size_t before = tt_allocated_bytes(ctx);
        bool ok = use_everything(ctx, folder, &s, &source);
        CHECK(ok == !a.failed && s.reads == s.released);
        if (!ok) CHECK_ERROR(ctx, TT_ERR_MEMORY, "memory");
        CHECK(tt_allocated_bytes(ctx) == before);
        done = ok;
        TEST_CLOSE(ctx, &a);
    }
    CHECK(done && n > 25);
}

/* Each call of the C library fails once: the error names the file and the reason. */
TEST(cifar_faults)
{
    static const struct { char kind; const char *says; int failures; } faults[] = {
        {'m', "out of memory", 10}, {'o', "cannot open '", 4}, {'z', "cannot open '", 10},
        {'r', "cannot read '", 4}, {'c', "ends at byte 0, but was longer when it was opened", 4}};
    test_allocator a;
    tt_context *ctx = test_open(&a);
    char folder[600], why[DATASET_WHY];
    snprintf(folder, sizeof folder, "%s", test_folder());
    for (int i = 1; i < 4; i++) cifar_write(folder, i, 2);
    test_write(test_path(folder, "batches.meta.txt"), "a\nb\nc\nd\ne\nf\ng\nh\ni\nj\n", 20);
    size_t before = tt_allocated_bytes(ctx);
    for (int k = 0; k < TEST_COUNT(faults); k++) {
        int failures = 0;
        bool done = false;
        for (long at = 1; !done && at < 100; at++) {
            cifar images;
            memset(why, 0, sizeof why);
            reader_faults.fail = faults[k].kind, reader_faults.at = at, reader_faults.calls = 0;
            tt_dataset *d = cifar_open(ctx, &images, folder, "train", why);
            done = reader_faults.calls < at;
            reader_faults.fail = 0;
            CHECK(done == (d != NULL));
            if (!d) CHECK(strstr(why, faults[k].says) && strstr(why, folder) && !images.pixels);
            if (!d && !strchr("mc", faults[k].kind)) CHECK(strstr(why, strerror(EIO)));
            failures += !d;
            tt_dataset_free(d);
            cifar_free(&images);
            CHECK(tt_allocated_bytes(ctx) == before);
        }
        CHECK(done && failures == faults[k].failures);
    }
    TEST_CLOSE(ctx, &a);
}

/* ------------------------------------------------------------------------------------------- image files */

TEST(images_are_turned_upright) /* turns as Pillow's ImageOps.exif_transpose does */
{
    static const char *const upright[9] = {"", "123456", "321654", "654321", "456123",
                                           "142536", "415263", "635241", "362514"};
    /* A JPEG with a comment, fill bytes, and EXIF in either byte order, whose second tag is orientation. */
    static const uint8_t head[] = {0xFF, 0xD8, 0xFF, 0xFE, 0, 4, 'h', 'i', 0xFF};
    static const uint8_t exif[2][48] = {
        {0xFF, 0xE1, 0, 46, 'E', 'x', 'i', 'f', 0, 0, 'M', 'M', 0, 42, 0, 0, 0, 8, 0, 2, 1, 0, 0, 3, 0, 0, 0,
         1, 0, 9, 0, 0, 0x01, 0x12, 0, 3, 0, 0, 0, 1, 0, 0 /* byte 41: the orientation */, 0, 0, 0, 0, 0, 0},
        {0xFF, 0xE1, 0, 46, 'E', 'x', 'i', 'f', 0, 0, 'I', 'I', 42, 0, 8, 0, 0, 0, 2, 0, 0, 1, 3, 0, 1, 0, 0,
         0, 9, 0, 0, 0, 0x12, 0x01, 3, 0, 1, 0, 0, 0, 0 /* byte 40: the orientation */, 0, 0, 0, 0, 0, 0, 0}};
    for (int order = 0; order < 2; order++)
        for (int orientation = 1; orientation <= 8; orientation++) {
            uint8_t bytes[64], *pixels = (uint8_t *)malloc(6);
            memcpy(bytes, head, sizeof head);
            memcpy(bytes + sizeof head, exif[order], 48);
            bytes[sizeof head + (order ? 40 : 41)] = (uint8_t)orientation;
            tt_image image = {pixels, 2, 3, 1};
            memcpy(pixels, "123456", 6);
            CHECK(jpeg_orientation(bytes, sizeof head + 48) == orientation);
            for (size_t n = 0; n < sizeof head + 48; n++) { /* a file that is cut off anywhere counts as
                                                               upright */
                uint8_t *copy = (uint8_t *)malloc(n + 1);
                memcpy(copy, bytes, n);
                CHECK(jpeg_orientation(copy, n) == 1);
                free(copy);
            }
            CHECK(image_turn(&image, orientation) && memcmp(image.pixels, upright[orientation], 6) == 0);
            CHECK(image.height == (orientation < 5 ? 2 : 3) && image.width == 5 - image.height);
            free((void *)(uintptr_t)image.pixels);
        }
    CHECK(jpeg_orientation((const uint8_t *)"\x89PNG", 4) == 1);
}

TEST(pnm_files)
{
    static const struct { const char *text, *wrong; int height, width, channels; } files[] = {
        {"P6 1 2\n255\nabcdef", NULL, 2, 1, 3},
        {"P5\n# a line\n2\t1 255 xy", NULL, 1, 2, 1},
        {"P6 1 2\n255\nabcde", "ends before its last pixel", 0, 0, 0},
        {"P6 1 2\n65535\nabcdefabcdef", "not that of a PPM or PGM of 8 bits", 0, 0, 0},
        {"P6 0 2\n255\n", "not that of a PPM", 0, 0, 0}, {"P6 1 x", "not that of a PPM", 0, 0, 0},
        {"P6 1 2 255", "not that of a PPM", 0, 0, 0}, {"P3 1 1 255 1 2 3", "not a PPM or PGM", 0, 0, 0},
        {"P", "not a PPM or PGM", 0, 0, 0}, {"P6 65536 1 255 ", "not that of a PPM", 0, 0, 0}};
    for (int k = 0; k < TEST_COUNT(files); k++) {
        tt_image image = {NULL, 0, 0, 0};
        const size_t n = strlen(files[k].text);
        uint8_t *bytes = (uint8_t *)malloc(n);
        memcpy(bytes, files[k].text, n);
        const char *wrong = pnm_read(bytes, n, true, &image);
        if (files[k].wrong) CHECK(wrong && strstr(wrong, files[k].wrong) != NULL);
        else
            CHECK(!wrong && image.height == files[k].height && image.width == files[k].width &&
                  image.channels == files[k].channels &&
                  image.pixels + image.height * image.width * image.channels == bytes + n);
        free(bytes);
    }
}

static const test_case tests[] = {
    TEST_CASE(resize_golden), TEST_CASE(resize_reference), TEST_CASE(resize_limits), TEST_CASE(cifar_files),
    TEST_CASE(images_are_turned_upright), TEST_CASE(pnm_files),
    TEST_CASE(cifar_split), TEST_CASE(image_dataset),
    TEST_CASE(image_loader_is_the_same_for_any_number_of_threads), TEST_CASE(image_loader_seeds),
    TEST_CASE(image_loader_transforms), TEST_CASE(image_loader_option_errors),
    TEST_CASE(image_loader_failing_source), TEST_CASE(image_loader_works_ahead_on_several_threads),
    TEST_CASE(image_loader_seeks_while_its_threads_work),
    TEST_CASE(image_loader_freed_while_its_threads_work), TEST_CASE(image_allocation_failures),
    TEST_CASE(cifar_faults),
};

int main(int argc, char **argv) { return test_main(argc, argv, tests, TEST_COUNT(tests)); }
