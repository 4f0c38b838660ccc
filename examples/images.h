/* Images for the command line: files in folders of classes, CIFAR-10, or shapes that are drawn here. A
   program includes this file once, after classifier.h.

   stb_image.h decodes image files if it is installed (Debian: libstb-dev) when this program is built. Without
   stb_image.h, programs read only PPM and PGM. JPEGs are turned upright by the orientation in their EXIF
   data. */
#ifndef EXAMPLES_IMAGES_H
#define EXAMPLES_IMAGES_H

#include "datasets.h"
#include <pthread.h>

#if defined(__has_include)
#if __has_include(<stb/stb_image.h>)
#define STB_IMAGE_IMPLEMENTATION
#define STBI_FAILURE_USERMSG /* makes the error messages of stb readable for users */
#define STBI_WINDOWS_UTF8 /* paths are UTF-8 on Windows, too */
#include <stb/stb_image.h>
#define HAS_STB
#endif
#endif
#ifdef HAS_STB
#define FORMATS "PNG, JPEG and others"
#else
#define FORMATS "only PPM and PGM, because this program was built without stb_image.h"
#endif

/* --------------------------------------------------------------------------------------- images of shapes */
enum { SHAPE_SIDE = 32, SHAPES = 10, SHAPES_TRAIN = 6600, SHAPES_TEST = 1000 };
static const char *const shape_names[SHAPES] = {"disc", "ring",  "half disc", "triangle", "square",
                                                "bar",  "cross", "star",      "heart",    "crescent"};

/* Returns whether (x, y) is inside a shape of radius about 1 around the origin. */
static bool inside(int shape, double x, double y)
{
    double r = sqrt(x * x + y * y), fifth = 2 * 3.14159265358979 / 5;
    switch (shape) {
    case 0: return r < 0.9;
    case 1: return r < 0.95 && r > 0.55;
    case 2: return r < 1.0 && y > -0.1;
    case 3: return y > -0.55 && fabs(x) < (1.05 - y) * 0.6;
    case 4: return fabs(x) < 0.75 && fabs(y) < 0.75;
    case 5: return fabs(x) < 1.05 && fabs(y) < 0.32;
    case 6: return (fabs(x) < 0.28 && fabs(y) < 0.95) || (fabs(y) < 0.28 && fabs(x) < 0.95);
    case 7:
        return r * (0.38 + fabs(fmod(atan2(y, x) + 10 * fifth, fifth) - fifth / 2) / (fifth / 2) * 0.62) <
               0.45;
    case 8: {
        double a = 1.15 * x, b = 1.15 * y + 0.1, c = a * a + b * b - 0.6;
        return c * c * c - a * a * b * b * b < 0;
    }
    default: return r < 0.95 && (x - 0.45) * (x - 0.45) + y * y > 0.55;
    }
}

typedef struct shapes { uint64_t seed; uint64_t first; } shapes;

static double uniform(uint64_t *state) /* in [0, 1); splitmix64 (Steele, Lea, Flood 2014) */
{
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return (double)((z ^ z >> 31) >> 11) * 0x1p-53;
}

/* Draws image i: shape i % 10 at a random place, with random size, colour, rotation and noise. */
static const char *draw_shape(void *user, int64_t i, tt_image *image)
{
    const shapes *s = (const shapes *)user;
    uint64_t random = s->seed * 1000003u + (s->first + (uint64_t)i) * 0x632BE59BD9B4E019u;
    uint8_t *pixels = (uint8_t *)malloc(SHAPE_SIDE * SHAPE_SIDE * 3);
    double radius = 8 + 5 * uniform(&random), room = SHAPE_SIDE - 2 * radius;
    double cx = radius + room * uniform(&random), cy = radius + room * uniform(&random);
    double turn = 2 * 3.14159265358979 * uniform(&random), noise = 5 + 20 * uniform(&random);
    double apart = 0, ground[3], colour[3];
    if (!pixels) return "out of memory: free memory";
    while (apart < 120) { /* draws colours until the shape is clearly brighter than the ground */
        apart = 0;
        for (int c = 0; c < 3; c++)
            apart += (colour[c] = 100 + 155 * uniform(&random)) - (ground[c] = 120 * uniform(&random));
    }
    for (int y = 0; y < SHAPE_SIDE; y++)
        for (int x = 0; x < SHAPE_SIDE; x++) {
            double cover = 0;
            for (int k = 0; k < 9; k++) {
                double dx = (x + (k % 3 + 0.5) / 3 - cx) / radius, dy = (y + (k / 3 + 0.5) / 3 - cy) / radius;
                cover += inside((int)(i % SHAPES), cos(turn) * dx + sin(turn) * dy,
                                cos(turn) * dy - sin(turn) * dx) /
                         9.0;
            }
            for (int c = 0; c < 3; c++) {
                double v = ground[c] + cover * (colour[c] - ground[c]) +
                           noise * (uniform(&random) + uniform(&random) - 1);
                pixels[(y * SHAPE_SIDE + x) * 3 + c] = (uint8_t)(v < 0 ? 0 : v > 255 ? 255 : v);
            }
        }
    image->pixels = pixels;
    image->height = image->width = SHAPE_SIDE;
    image->channels = 3;
    return NULL;
}

static void free_pixels(void *user, tt_image *image) { (void)user, free((void *)(uintptr_t)image->pixels); }

/* ---------------------------------------------------------------------------------------- images of files */
/* Checks the first bytes of a file. Returns NULL if the bytes begin an image, or words that say what is
   wrong. */
static const char *look_at(const char *path)
{
    file_info found = {false, false, 0}; /* refuses a pipe, whose reader would wait for a writer */
    if (find_file(path, &found) && !found.is_file) return "it is not a regular file";
#ifdef HAS_STB
    int width, height, channels;
    return stbi_info(path, &width, &height, &channels) ? NULL : stbi_failure_reason();
#else
    uint8_t bytes[4096];
    tt_image image;
    FILE *f = open_file(path, "rb");
    if (!f) return "it cannot be opened";
    size_t n = fread(bytes, 1, sizeof bytes, f);
    fclose(f);
    return pnm_read(bytes, n, false, &image);
#endif
}

/* Decodes the bytes of a file to an upright image, and frees the bytes. Returns NULL, or words that say what
   is wrong. */
static const char *decode_bytes(char *file, size_t n, tt_image *image)
{
    const uint8_t *bytes = (const uint8_t *)file;
#ifdef HAS_STB
    image->pixels = stbi_load_from_memory(bytes, (int)n, &image->width, &image->height, NULL, 3);
    image->channels = 3;
    const char *wrong = image->pixels ? NULL : stbi_failure_reason();
    if (!wrong && !image_turn(image, jpeg_orientation(bytes, n))) {
        free_pixels(NULL, image);
        wrong = "out of memory: free memory";
    }
#else
    const char *wrong = pnm_read(bytes, n, true, image);
    if (!wrong) { /* moves the pixels to the start of the memory, as free_pixels needs */
        memmove(file, image->pixels, n - (size_t)(image->pixels - bytes));
        image->pixels = bytes;
        return NULL;
    }
    if (!is_pnm(bytes, n))
        wrong = "it is not a PPM or PGM, and this program was built without stb_image.h, which reads PNG and "
                "JPEG (Debian: apt-get install libstb-dev, then make again)";
#endif
    free(file);
    return wrong;
}

/* Reads an upright image from a file. Returns NULL, or the reason why the file cannot be read. The reason is
   valid until the thread's next call. */
static const char *decode(const char *path, tt_image *image)
{
    static __thread char why[DATASET_WHY];
    size_t n;
    char *file = dataset_file(path, (size_t)1 << 30, &n, why);
    return file ? decode_bytes(file, n, image) : why;
}

static void read_image(const char *path, tt_image *image) /* ends the program after an error */
{
    char why[DATASET_WHY];
    size_t n;
    char *file = dataset_file(path, (size_t)1 << 30, &n, why);
    if (!file) die("%s", why);
    const char *wrong = decode_bytes(file, n, image);
    if (wrong) die("cannot read '%s': %s", path, wrong);
}

/* Image files and their classes. wrong: the reason why a file cannot be read; NULL: no error so far. */
typedef struct image_file { char *path, *wrong; int label; } image_file;
typedef struct image_files {
    char *root;
    image_file *file;
    const char **class_name;
    int count, classes;
} image_files;

static const char *read_file(void *user, int64_t i, tt_image *image)
{ return decode(((const image_file *)user)[i].path, image); }
static const char *file_name(void *user, int64_t i) { return ((const image_file *)user)[i].path; }

static int by_name(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

static bool is_folder(const char *path)
{
    file_info found = {false, false, 0};
    return find_file(path, &found) && found.is_folder;
}

/* The paths in the folder `path`, and the number of hidden files, which the list lacks. */
typedef struct folder_list { const char *path; char **paths; int count, hidden; } folder_list;

static bool list_entry(void *arg, const char *name)
{
    folder_list *l = (folder_list *)arg;
    if (name[0] == '.') return l->hidden++, true;
    l->paths = (char **)made(NULL, realloc(l->paths, (size_t)(l->count + 1) * sizeof *l->paths));
    l->paths[l->count++] = join(l->path, name);
    return true;
}

/* Lists the paths in a folder, sorted, and returns their number. Adds the number of hidden files, which the
   list lacks, to *hidden. */
static int list(const char *path, char ***paths, int *hidden)
{
    folder_list l = {path, NULL, 0, 0};
    each_entry(path, list_entry, &l);
    if (l.count) qsort(l.paths, (size_t)l.count, sizeof *l.paths, by_name);
    *paths = l.paths;
    *hidden += l.hidden;
    return l.count;
}

/* Number of threads that check files: parallel reads are faster on most disks and networks. */
enum { LOOKERS = 16 };
typedef struct looker { image_files *f; int first; bool whole; } looker;

static void *look(void *arg)
{
    const looker *l = (const looker *)arg;
    for (int k = l->first; k < l->f->count; k += LOOKERS) {
        tt_image image;
        const char *wrong = look_at(l->f->file[k].path);
        const bool whole = !wrong && l->whole;
        if (whole) wrong = decode(l->f->file[k].path, &image);
        if (whole && !wrong) free_pixels(NULL, &image);
        if (wrong) l->f->file[k].wrong = (char *)made(NULL, strdup(wrong));
    }
    return NULL;
}

/* Checks the first bytes of all files, and ends the program if a file cannot be read. With `skip`, decodes
   all files instead, and leaves out files that cannot be read. */
static void check_files(image_files *f, bool skip)
{
    looker lookers[LOOKERS];
    pthread_t thread[LOOKERS];
    int kept = 0;
    for (int t = 0; t < LOOKERS; t++) {
        const looker l = {f, t, skip};
        lookers[t] = l;
        if (pthread_create(&thread[t], NULL, look, &lookers[t]) != 0)
            die("cannot start threads: set --threads lower");
    }
    for (int t = 0; t < LOOKERS; t++) pthread_join(thread[t], NULL);
    image_file first = {NULL, NULL, 0};
    for (int k = 0; k < f->count; k++)
        if (!f->file[k].wrong) f->file[kept++] = f->file[k];
        else if (!first.path) first = f->file[k];
    const int bad = f->count - kept;
    f->count = kept;
    if (!bad) return;
    char more[64] = "";
    if (bad > 1) snprintf(more, sizeof more, ", and %d more cannot be read", bad - 1);
    if (!skip)
        die("'%s' cannot be read (%s)%s: remove files that are not images, or leave them out with "
            "--skip-unreadable (this program reads %s)", first.path, first.wrong, more, FORMATS);
    printf("note: left out: '%s' cannot be read (%s)%s\n", first.path, first.wrong, more);
}

/* Returns the image files root/CLASS/FILE. A second call with the same root reads nothing. Folders without an
   image, and __MACOSX from archives, are no classes. */
static const image_files *read_classes(const char *root, bool skip)
{
    static image_files read[2]; /* results of earlier calls: DIR/train and DIR/test, or DIR */
    image_files *f = &read[read[0].root && strcmp(read[0].root, root) != 0];
    if (f->root) return f;
    char **paths, **files, left_out[400] = "";
    int hidden = 0, n = list(root, &paths, &hidden), classes = 0;
    f->root = (char *)made(NULL, strdup(root));
    f->class_name = (const char **)made(NULL, calloc((size_t)n + 1, sizeof *f->class_name));
    for (int c = 0; c < n; c++) { /* separates folders of classes from other entries */
        char *name = strrchr(paths[c], '/') + 1;
        const bool is_class = is_folder(paths[c]) && strcmp(name, "__MACOSX") != 0;
        const size_t said = strlen(left_out);
        if (is_class) f->class_name[classes++] = name;
        else snprintf(left_out + said, sizeof left_out - said, ", '%s'", name);
    }
    tt_sort_class_names(f->class_name, classes);
    for (int c = 0; c < classes; c++) {
        char *path = join(root, f->class_name[c]);
        const int in_it = list(path, &files, &hidden);
        const size_t bytes = (size_t)(f->count + in_it + 1) * sizeof *f->file;
        f->file = (image_file *)made(NULL, realloc(f->file, bytes));
        for (int k = 0; k < in_it; k++) {
            const image_file file = {files[k], NULL, c};
            f->file[f->count++] = file;
        }
        free((void *)files), free(path);
    }
    check_files(f, skip);
    for (int c = 0, k = 0; c < classes; c++) {
        const size_t said = strlen(left_out);
        const int first = k;
        for (; k < f->count && f->file[k].label == c; k++) f->file[k].label = f->classes;
        if (k > first) f->class_name[f->classes++] = f->class_name[c];
        else snprintf(left_out + said, sizeof left_out - said, ", '%s' (has no images)", f->class_name[c]);
    }
    const size_t said = strlen(left_out);
    if (hidden) snprintf(left_out + said, sizeof left_out - said, ", %d hidden", hidden);
    if (*left_out) printf("note: left out of '%s': %s\n", root, left_out + 2);
    free((void *)paths);
    return f;
}

/* Returns the image files of DIR/split/CLASS. If DIR has no splits, returns files of DIR/CLASS: every tenth
   file of a class if split is "test", else all other files. */
static image_files read_folder(const char *data, const char *split, bool skip)
{
    char *root = join(data, split);
    const bool splits = is_folder(root), test = strcmp(split, "test") == 0;
    const image_files *all = read_classes(splits ? root : data, skip);
    image_files chosen = *all;
    chosen.file = (image_file *)made(NULL, calloc((size_t)all->count + 1, sizeof *chosen.file));
    chosen.count = 0;
    for (int k = 0, of_class = 0; k < all->count; k++) {
        of_class = k && all->file[k].label == all->file[k - 1].label ? of_class + 1 : 0;
        if (splits || test == (of_class % 10 == 9)) chosen.file[chosen.count++] = all->file[k];
    }
    free(root);
    if (!chosen.count)
        die("'%s' has no images to %s; expected a folder of images for each class%s", data, split,
            exists(data) ? "" : " (the folder does not exist)");
    return chosen;
}

/* --------------------------------------------------------------------------------------------------- data */
typedef struct images { tt_dataset *d; shapes drawn; image_files files; cifar cifar; } images;

static bool is_cifar(const char *data)
{
    return data && (holds(data, "data_batch_1.bin") || holds(data, "test_batch.bin"));
}

/* Reads the images of a split: "train", which includes the images to validate on, or "test". skip: leave out
   files that cannot be read. */
static void read_images(tt_context *ctx, const cli_training *run, images *x, const char *split, bool skip)
{
    const bool train = strcmp(split, "train") == 0;
    const int n = train ? with_held_out(run) : run->test;
    tt_image_source s = {.release = free_pixels};
    char why[DATASET_WHY];
    memset(x, 0, sizeof *x);
    if (is_cifar(run->data)) {
        x->d = cifar_open(ctx, &x->cifar, run->data, split, why);
        if (!x->d) die("%s", why);
    } else if (run->data) {
        x->files = read_folder(run->data, split, skip);
        s.count = x->files.count, s.class_names = x->files.class_name, s.classes = x->files.classes;
        s.read = read_file, s.name = file_name, s.user = x->files.file;
    } else {
        s.count = n ? n : train ? SHAPES_TRAIN : SHAPES_TEST;
        x->drawn.seed = (uint64_t)run->seed, x->drawn.first = train ? 0 : (uint64_t)1 << 40;
        s.class_names = shape_names, s.classes = SHAPES;
        s.read = draw_shape, s.user = &x->drawn;
    }
    if (!x->d) {
        int *labels = (int *)made(NULL, calloc((size_t)s.count, sizeof *labels));
        for (int64_t k = 0; k < s.count; k++)
            labels[k] = run->data ? x->files.file[k].label : (int)(k % SHAPES);
        s.labels = labels;
        x->d = (tt_dataset *)made(ctx, tt_dataset_images(ctx, &s));
        free(labels);
    }
    x->d = keep_some(ctx, run, x->d, split, n, "images");
}

static void free_images(images *x)
{
    tt_dataset_free(x->d);
    free(x->files.file);
    cifar_free(&x->cifar);
}

/* Ends the program unless a dataset has the classes `names` of a model, in any order. whose: words for the
   model's classes. */
static void check_classes(const cli_training *run, const tt_dataset *d, const char *split,
                          char (*names)[64], int classes, const char *whose)
{
    if (tt_dataset_classes(d) != classes)
        die("'%s' has %d classes to %s, but must have %d, as many as %s: use other data or another model",
            run->data, tt_dataset_classes(d), split, classes, whose);
    for (int c = 0; c < classes; c++) {
        const char *name = tt_dataset_class_name(d, c);
        int k = 0;
        while (k < classes && strcmp(name, names[k]) != 0) k++;
        if (k == classes)
            die("'%s' has a class '%s' to %s, which is not one of %s: rename or remove it", run->data, name,
                split, whose);
    }
}

static tt_vit image_teacher; /* the model of --teacher, or zeros */

/* Loads --teacher, and makes teacher, model and datasets agree on the classes. Keeps the layers of --layers,
   and sets --dropout and --freeze. */
static void prepare_model(tt_context *ctx, cli_training *run, tt_vit *m, tt_dataset *d, tt_dataset *held)
{
    static tt_model model;
    if (run->teacher) {
        must(ctx, tt_param_prefix(ctx, "teacher."));
        must(ctx, tt_vit_load(ctx, &image_teacher, run->teacher, m->config.image_size,
                              tt_dataset_classes(d)));
        must(ctx, tt_param_prefix(ctx, NULL));
        if (image_teacher.new_head)
            die("--teacher '%s' has no trained classifier for these classes: train it on this data "
                "first", run->teacher);
        check_teacher_names(run, image_teacher.class_names, d);
        must(ctx, tt_vit_name_classes(&image_teacher, d));
        model = tt_vit_classifier(&image_teacher);
        run->teacher_model = &model;
    }
    must(ctx, tt_vit_name_classes(m, d));
    must(ctx, tt_vit_name_classes(m, held));
    if (run->teacher) check_teacher(run, image_teacher.class_names, m->class_names, m->config.classes);
    m->config.layers = keep_layers(run, m->layer, sizeof *m->layer, m->config.layers);
    if (run->dropout >= 0) m->config.dropout = m->config.attention_dropout = (float)run->dropout;
    freeze(ctx, run->freeze);
}

/* Removes heads and neurons from the model *self. */
static void prune_images(tt_context *ctx, const cli_training *run, void *self, const tt_source *source)
{
    tt_vit *m = (tt_vit *)self;
    const tt_train_options train = training_options(run, 1);
    const tt_prune_options o = prune_options(run, m->config.heads, m->config.intermediate_size);
    tt_importance *x = NULL; /* a plan needs the sizes alone */
    if (!run->plan) x = (tt_importance *)made(ctx, tt_vit_importance(m, source, PRUNE_STEPS, &train));
    m->torchvision = m->torchvision && o.heads == m->config.heads; /* torchvision's ViT needs all heads */
    must(ctx, tt_vit_prune(m, x, &o));
    tt_importance_free(x);
}

#endif
