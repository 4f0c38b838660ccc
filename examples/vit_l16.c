/* Trains a vision transformer to tell images apart.

   A small ViT from scratch, on images of ten shapes that it draws itself:
       make build/vit_l16 && build/vit_l16
   ViT-L/16 on CIFAR-10:
       build/vit_l16 --data cifar-10-batches-bin --model vit-large-patch16-224/ --batch 16 --accumulate 4
   From scratch, on photos/{train,test}/CLASS/... or photos/CLASS/...:
       build/vit_l16 --data photos --vit S/16 --size 224 --augment
   On four GPUs, each with a quarter of the parameters, gradients and optimizer state:
       build/cuda/vit_l16 --data photos --vit L/16 --device cuda*4 --zero 3
   As many images at a time as 3 GB hold:
       build/cuda/vit_l16 --data photos --vit L/16 --device cuda --budget 3GB --batch max
   With less memory of the GPU and more of the host's:
       build/cuda/vit_l16 --data photos --vit L/16 --device cuda --recompute blocks --offload optimizer
   Classify with what was trained:
       build/vit_l16 --out run --predict cat.jpg

   Image files are decoded by stb_image.h, where it is installed (Debian: libstb-dev) when this is built;
   without it only PPM and PGM are read. JPEGs are turned upright as their EXIF says. */

#define TINYTRAIN_IMPLEMENTATION
#include "../tinytrain.h"
#include "cli.h"
#include "datasets.h"

#include <pthread.h>

#if defined(__has_include)
#if __has_include(<stb/stb_image.h>)
#define STB_IMAGE_IMPLEMENTATION
#define STBI_FAILURE_USERMSG /* reasons in words for users */
#include <stb/stb_image.h>
#define HAS_STB
#endif
#endif
#ifdef HAS_STB
#define FORMATS "PNG, JPEG and others"
#else
#define FORMATS "PPM and PGM alone, as this program was built without stb_image.h"
#endif

/* ------------------------------------------------------------------------------------------------ options */
static struct {
    const char *data, *model, *vit, *predict;
    int size, train, test, epochs, batch, accumulate;
    bool augment, skip_unreadable;
    cli_training run;
} opt = {.accumulate = 1, .run = {CLI_CLASSIFIER_DEFAULT, .schedule = "cosine"}};

static const cli_flag flags[] = {
    {"--data", "DIR", CLI_TEXT, &opt.data, .help = "cifar-10-batches-bin, or a folder of images: "
     "DIR/train/CLASS/FILE and DIR/test/..., or DIR/CLASS/FILE, of " FORMATS " (none: shapes, drawn here)"},
    {"--skip-unreadable", "", CLI_SWITCH, &opt.skip_unreadable,
     .help = "decode each file before training, and leave out those that cannot be read, instead of ending "
     "there"},
    {"--model", "PATH", CLI_TEXT, &opt.model, .help = "checkpoint to start from: a folder or a .safetensors "
     "file, of transformers or torchvision (none: from scratch)"},
    {"--vit", "SIZE", CLI_TEXT, &opt.vit, .help = "from scratch: Ti/16, S/16, B/16, L/16 or H/14, or with "
     "patches of another size (none: L/16 for CIFAR-10 at --size 224, else a small one)"},
    {"--size", "N", CLI_INTEGER, &opt.size, .help = "height and width of what the model sees; images are "
     "resized to it (0: as the model says; from scratch 32, or with --vit 224, but 32 for CIFAR-10)",
     .most = 16384},
    {"--augment", "", CLI_SWITCH, &opt.augment,
     .help = "training images: shifted by up to an eighth and mirrored at random"},
    {"--train", "N", CLI_INTEGER, &opt.train,
     .help = "images to train on (0: all but those for validation)", .most = 1e9},
    {"--test", "N", CLI_INTEGER, &opt.test, .help = "images to test on (0: all)", .most = 1e9},
    {"--epochs", "N", CLI_INTEGER, &opt.epochs,
     .help = "passes over the training images (0: 3 with --model, else 12; more, up to 20, if these were "
     "fewer than 200 steps)", .most = 1e9},
    {"--batch", "N", CLI_INTEGER, &opt.batch, .help = "images in a step; max: as many as --budget, or else "
     "a GPU's memory, allows (0: 16 with --model, else 20)", .most = 65536, .choices = "max"},
    {"--accumulate", "N", CLI_INTEGER, &opt.accumulate,
     .help = "micro-batches in a step, for each of --groups", .least = 1, .most = 65536},
    {"--lr", "X", CLI_NUMBER, &opt.run.lr,
     .help = "peak learning rate (0: 5e-5 with --model, else 1e-3)", .most = 1e9},
    CLI_CLASSIFIER_FLAGS(opt.run),
    {"--predict", "FILE", CLI_TEXT, &opt.predict, .help = "classify an image file with the model in --out"},
};

static void read_options(int argc, char **argv)
{
    cli_parse(argc, argv, flags, CLI_COUNT(flags), "vit_l16",
              "Trains a vision transformer to tell images apart.");
    if (opt.run.lr == 0) opt.run.lr = opt.model ? 5e-5 : 1e-3;
    if (!opt.batch) opt.batch = opt.model ? 16 : 20;
    if (opt.batch != CLI_WORD && opt.accumulate > opt.batch)
        die("--accumulate %d is more than --batch %d", opt.accumulate, opt.batch);
    check_training(&opt.run);
    if (opt.model && opt.vit) die("--vit is for training from scratch; --model says its own size");
}

/* --------------------------------------------------------------------------------------- images of shapes */
enum { SHAPE_SIDE = 32, SHAPES = 10, SHAPES_TRAIN = 6600, SHAPES_TEST = 1000 };
static const char *const shape_names[SHAPES] = {"disc", "ring",  "half disc", "triangle", "square",
                                                "bar",  "cross", "star",      "heart",    "crescent"};

/* Is (x, y) inside of a shape of about unit size? */
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

static double uniform(uint64_t *state) /* [0, 1); splitmix64 (Steele, Lea, Flood 2014) */
{
    uint64_t z = *state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return (double)((z ^ z >> 31) >> 11) * 0x1p-53;
}

/* Image number i shows shape i % 10 at a random place, in a random size, colour and rotation, with noise. */
static const char *draw_shape(void *user, int64_t i, tt_image *image)
{
    const shapes *s = (const shapes *)user;
    uint64_t random = s->seed * 1000003u + (s->first + (uint64_t)i) * 0x632BE59BD9B4E019u;
    uint8_t *pixels = (uint8_t *)malloc(SHAPE_SIDE * SHAPE_SIDE * 3);
    double radius = 8 + 5 * uniform(&random), room = SHAPE_SIDE - 2 * radius;
    double cx = radius + room * uniform(&random), cy = radius + room * uniform(&random);
    double turn = 2 * 3.14159265358979 * uniform(&random), noise = 5 + 20 * uniform(&random);
    double apart = 0, ground[3], colour[3];
    if (!pixels) return "no memory";
    while (apart < 120) { /* bright on dark */
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
/* Of a file only the first bytes: NULL if they are those of an image, or words. */
static const char *look_at(const char *path)
{
    struct stat s; /* a pipe would wait for who writes it */
    if (stat(path, &s) == 0 && !S_ISREG(s.st_mode)) return "it is no regular file";
#ifdef HAS_STB
    int width, height, channels;
    return stbi_info(path, &width, &height, &channels) ? NULL : stbi_failure_reason();
#else
    uint8_t bytes[4096];
    tt_image image;
    FILE *f = fopen(path, "rb");
    if (!f) return "it cannot be opened";
    size_t n = fread(bytes, 1, sizeof bytes, f);
    fclose(f);
    return pnm_read(bytes, n, false, &image);
#endif
}

/* Reads an image file, upright. Returns NULL, or words that are valid until the thread's next call. */
static const char *decode(const char *path, tt_image *image)
{
    static __thread char why[DATASET_WHY];
    size_t n;
    char *file = dataset_file(path, (size_t)1 << 30, &n, why);
    const uint8_t *bytes = (const uint8_t *)file;
    if (!file) return why;
#ifdef HAS_STB
    image->pixels = stbi_load_from_memory(bytes, (int)n, &image->width, &image->height, NULL, 3);
    image->channels = 3;
    const char *wrong = image->pixels ? NULL : stbi_failure_reason();
    if (!wrong && !image_turn(image, jpeg_orientation(bytes, n))) {
        free_pixels(NULL, image);
        wrong = "no memory";
    }
#else
    const char *wrong = pnm_read(bytes, n, true, image);
    if (!wrong) { /* the pixels take the file's place */
        memmove(file, image->pixels, n - (size_t)(image->pixels - bytes));
        image->pixels = bytes;
        file = NULL;
    } else if (!strncmp(wrong, "it is no", 8)) {
        wrong = "it is no PPM or PGM, and this program was built without stb_image.h, which reads PNG and "
                "JPEG (Debian: apt-get install libstb-dev, then make again)";
    }
#endif
    free(file);
    return wrong;
}

typedef struct folder {
    char *root, **path;
    int *label;
    char **wrong; /* of each file: why it cannot be read; NULL: it can, so far */
    char **class_name;
    int count, classes;
} folder;

static int by_name(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

/* By value, where all are numbers. */
static int by_number(const void *a, const void *b)
{
    const double x = strtod(*(char *const *)a, NULL), y = strtod(*(char *const *)b, NULL);
    return x != y ? (x > y) - (x < y) : by_name(a, b);
}

static bool is_number(const char *name)
{
    const char *digits = "0123456789", *c = name + (*name == '-' || *name == '+'), *whole = c;
    c += strspn(c, digits);
    return c > whole && c[*c == '.' ? 1 + strspn(c + 1, digits) : 0] == 0;
}

/* The sorted names of what lies in a folder, but for hidden files, which *hidden counts; how many. */
static int list(const char *path, char ***names, int *hidden)
{
    DIR *d = opendir(path);
    int n = 0;
    *names = NULL;
    for (struct dirent *e = d ? readdir(d) : NULL; e; e = readdir(d)) {
        const char *name = e->d_name;
        if (name[0] == '.') *hidden += strcmp(name, ".") != 0 && strcmp(name, "..") != 0;
        else {
            *names = (char **)made(NULL, realloc(*names, (size_t)(n + 1) * sizeof **names));
            (*names)[n++] = (char *)made(NULL, strdup(name));
        }
    }
    if (d) closedir(d);
    if (n) qsort(*names, (size_t)n, sizeof **names, by_name);
    return n;
}

static bool is_folder(const char *path) { struct stat s; return stat(path, &s) == 0 && S_ISDIR(s.st_mode); }

/* Several threads look at the files, as a disk or a network serves several at a time. */
enum { LOOKERS = 16 };
typedef struct looker { folder *f; int first; } looker;

static void *look(void *arg)
{
    const looker *l = (const looker *)arg;
    for (int k = l->first; k < l->f->count; k += LOOKERS) {
        tt_image image;
        const char *wrong = look_at(l->f->path[k]);
        const bool whole = !wrong && opt.skip_unreadable;
        if (whole) wrong = decode(l->f->path[k], &image);
        if (whole && !wrong) free_pixels(NULL, &image);
        if (wrong) l->f->wrong[k] = (char *)made(NULL, strdup(wrong));
    }
    return NULL;
}

/* Looks at the first bytes of all files, and ends the program with the name of one that cannot be read; or
   decodes all, and leaves these out. */
static void check_files(folder *f)
{
    looker lookers[LOOKERS];
    pthread_t thread[LOOKERS];
    int bad = 0, first = 0, kept = 0;
    f->wrong = (char **)made(NULL, calloc((size_t)f->count + 1, sizeof *f->wrong));
    for (int t = 0; t < LOOKERS; t++) {
        lookers[t].f = f, lookers[t].first = t;
        if (pthread_create(&thread[t], NULL, look, &lookers[t]) != 0) die("no memory for threads");
    }
    for (int t = 0; t < LOOKERS; t++) pthread_join(thread[t], NULL);
    for (int k = 0; k < f->count; k++) if (f->wrong[k] && !bad++) first = k;
    if (!bad) return;
    char more[64] = "";
    if (bad > 1) snprintf(more, sizeof more, ", nor can %d more", bad - 1);
    if (!opt.skip_unreadable)
        die("'%s' cannot be read (%s)%s: take away what is no image, or leave it out with --skip-unreadable "
            "(this reads %s)", f->path[first], f->wrong[first], more, FORMATS);
    printf("note: left out: '%s' cannot be read (%s)%s\n", f->path[first], f->wrong[first], more);
    for (int k = 0; k < f->count; k++)
        if (f->wrong[k]) free(f->path[k]);
        else f->path[kept] = f->path[k], f->label[kept++] = f->label[k];
    f->count = kept;
}

/* Classes without a file are none. */
static void drop_empty_classes(folder *f, char *left_out, size_t room)
{
    int *number = (int *)made(NULL, calloc((size_t)f->classes + 1, sizeof *number)), kept = 0;
    for (int k = 0; k < f->count; k++) number[f->label[k]] = 1;
    for (int c = 0; c < f->classes; c++) {
        size_t n = strlen(left_out);
        if (!number[c]) {
            snprintf(left_out + n, room - n, ", '%s' (no image in it)", f->class_name[c]);
            free(f->class_name[c]);
        } else number[c] = kept, f->class_name[kept++] = f->class_name[c];
    }
    for (int k = 0; k < f->count; k++) f->label[k] = number[f->label[k]];
    f->classes = kept;
    free(number);
}

static bool holds_class(const char *root, const char *name)
{
    char *path = join(root, name);
    const bool is_class = is_folder(path) && strcmp(name, "__MACOSX") != 0; /* of archives */
    free(path);
    return is_class;
}

/* Images of root/CLASS. Each folder is read and looked through once. */
static const folder *read_classes(const char *root)
{
    static folder read[2]; /* DIR/train and DIR/test, or DIR */
    folder *f = &read[read[0].root && strcmp(read[0].root, root) != 0];
    char **names, **files, left_out[400] = "";
    int hidden = 0, n_names = f->root ? 0 : list(root, &names, &hidden);
    if (f->root) return f;
    f->root = (char *)made(NULL, strdup(root));
    f->class_name = (char **)made(NULL, calloc((size_t)n_names + 1, sizeof *f->class_name));
    int words = 0;
    for (int c = 0; c < n_names; c++) words += holds_class(root, names[c]) && !is_number(names[c]);
    if (n_names && !words) qsort(names, (size_t)n_names, sizeof *names, by_number);
    for (int c = 0; c < n_names; c++) {
        char *path = join(root, names[c]);
        const bool is_class = holds_class(root, names[c]);
        int n = is_class ? list(path, &files, &hidden) : 0;
        size_t said = strlen(left_out);
        if (!is_class) snprintf(left_out + said, sizeof left_out - said, ", '%s'", names[c]), free(names[c]);
        else f->class_name[f->classes++] = names[c];
        f->path = (char **)made(NULL, realloc(f->path, (size_t)(f->count + n + 1) * sizeof *f->path));
        f->label = (int *)made(NULL, realloc(f->label, (size_t)(f->count + n + 1) * sizeof *f->label));
        for (int k = 0; k < n; k++) {
            f->path[f->count] = join(path, files[k]);
            f->label[f->count++] = f->classes - 1;
            free(files[k]);
        }
        if (is_class) free(files);
        free(path);
    }
    free(names);
    check_files(f);
    drop_empty_classes(f, left_out, sizeof left_out);
    size_t said = strlen(left_out);
    if (hidden) snprintf(left_out + said, sizeof left_out - said, ", %d hidden", hidden);
    if (*left_out) printf("note: left out of '%s': %s\n", root, left_out + 2);
    return f;
}

/* Images of DIR/split/CLASS, or of DIR/CLASS: then every tenth of a class is "test". */
typedef struct chosen { const folder *all; const char **path; int *label, count; } chosen;

static chosen *read_folder(const char *split)
{
    chosen *s = (chosen *)made(NULL, calloc(1, sizeof *s));
    char *root = join(opt.data, split);
    bool splits = is_folder(root), test = strcmp(split, "test") == 0;
    const folder *f = s->all = read_classes(splits ? root : opt.data);
    s->path = (const char **)made(NULL, calloc((size_t)f->count + 1, sizeof *s->path));
    s->label = (int *)made(NULL, calloc((size_t)f->count + 1, sizeof *s->label));
    for (int k = 0, of_class = 0; k < f->count; k++) {
        of_class = k && f->label[k] == f->label[k - 1] ? of_class + 1 : 0;
        if (!splits && test != (of_class % 10 == 9)) continue;
        s->path[s->count] = f->path[k];
        s->label[s->count++] = f->label[k];
    }
    free(root);
    if (!s->count)
        die("'%s' has no images to %s: it needs folders of images, one a class%s", opt.data, split,
            exists(opt.data) ? "" : " (and is not there)");
    return s;
}

static const char *read_file(void *user, int64_t i, tt_image *image)
{ return decode(((const chosen *)user)->path[i], image); }
static const char *file_name(void *user, int64_t i) { return ((const chosen *)user)->path[i]; }

/* --------------------------------------------------------------------------------------------------- data */
typedef struct images { tt_dataset *d; shapes drawn; chosen *files; cifar cifar; } images;

static bool is_cifar(void)
{
    return opt.data && (holds(opt.data, "data_batch_1.bin") || holds(opt.data, "test_batch.bin"));
}

/* "train" (n of them, and a tenth more for validation) or "test" (n); n 0: all. */
static void read_images(tt_context *ctx, images *x, const char *split, int n)
{
    bool train = strcmp(split, "train") == 0;
    tt_image_source s = {.release = free_pixels};
    char why[DATASET_WHY];
    int *labels = NULL;
    memset(x, 0, sizeof *x);
    if (train && n) n += (n + 9) / 10;
    if (is_cifar()) {
        x->d = cifar_open(ctx, &x->cifar, opt.data, split, why);
        if (!x->d) die("%s", why);
    } else if (opt.data) {
        x->files = read_folder(split);
        s.count = x->files->count, s.labels = x->files->label;
        s.class_names = (const char *const *)x->files->all->class_name;
        s.classes = x->files->all->classes;
        s.read = read_file, s.name = file_name, s.user = x->files;
    } else {
        s.count = n ? n : train ? SHAPES_TRAIN : SHAPES_TEST;
        labels = (int *)made(NULL, calloc((size_t)s.count, sizeof *labels));
        for (int64_t k = 0; k < s.count; k++) labels[k] = (int)(k % SHAPES);
        x->drawn.seed = (uint64_t)opt.run.seed, x->drawn.first = train ? 0 : (uint64_t)1 << 40;
        s.labels = labels, s.class_names = shape_names, s.classes = SHAPES;
        s.read = draw_shape, s.user = &x->drawn;
    }
    if (!x->d) x->d = (tt_dataset *)made(ctx, tt_dataset_images(ctx, &s));
    free(labels);
    long long there = (long long)tt_dataset_count(x->d);
    const char *more = train ? " with those for validation" : "";
    if (n > there) die("--%s needs %d images%s; '%s' has %lld to %s", split, n, more, opt.data, there, split);
    if (!n || n == there) return;
    tt_dataset *part = (tt_dataset *)made(ctx, tt_dataset_split(x->d, n));
    tt_dataset_free(x->d);
    x->d = part;
}

/* Ends the program where a dataset has other classes than a model, in whatever order. */
static void check_classes(const tt_dataset *d, const char *split, const tt_vit *model, const char *whose)
{
    const int classes = model->config.classes;
    if (tt_dataset_classes(d) != classes)
        die("'%s' has %d classes to %s, %s %d", opt.data, tt_dataset_classes(d), split, whose, classes);
    for (int c = 0; c < classes; c++) {
        const char *name = tt_dataset_class_name(d, c);
        int k = 0;
        while (k < classes && strcmp(name, model->class_names[k]) != 0) k++;
        if (k == classes)
            die("'%s' has a class '%s' to %s, which is none of %s", opt.data, name, split, whose);
    }
}

static void free_images(images *x)
{
    tt_dataset_free(x->d);
    if (x->files) free(x->files->path), free(x->files->label), free(x->files);
    cifar_free(&x->cifar);
}

static tt_loader *loader_of(tt_context *ctx, const tt_dataset *d, const tt_vit *m, bool train)
{
    tt_image_options image = tt_vit_image_options(m);
    tt_loader_options o = tt_loader_options_default();
    const int side = image.height, short_side = image.resize_shortest, tall = image.resize_height;
    image.flip = image.random_crop = train && opt.augment;
    if (image.random_crop) { /* an eighth of what the model sees, of which a larger image has some already */
        const int lacks = side - (short_side ? short_side : tall ? tall : side);
        const int pad = (2 * (side / 8) + lacks + 1) / 2;
        image.pad = pad < 0 ? 0 : pad;
    }
    o.batch = opt.batch;
    o.accumulate = opt.accumulate;
    o.parallel = opt.run.parallel;
    o.shuffle = train;
    return (tt_loader *)made(ctx, tt_image_loader_new(ctx, d, &image, &o));
}

/* -------------------------------------------------------------------------------------- model and trainer */
/* The start of training: a checkpoint, or random weights. */
static void make_model(tt_context *ctx, tt_vit *m, tt_dataset *d, tt_dataset *held)
{
    if (opt.model) {
        must(ctx, tt_vit_load(ctx, m, opt.model, opt.size, tt_dataset_classes(d)));
    } else {
        if (!opt.vit && opt.size == 224 && is_cifar()) opt.vit = "L/16";
        tt_vit_config c = tt_vit_config_default(opt.vit ? opt.vit : "Ti/8");
        if (!opt.vit) c.hidden_size = 128, c.layers = 4, c.heads = 4, c.intermediate_size = 256;
        if (!c.hidden_size || c.patch_size < 1)
            die("--vit '%s' is unknown: use Ti, S, B, L or H, a slash and the size of a patch, as in S/16",
                opt.vit);
        c.image_size = opt.size ? opt.size : opt.vit && !is_cifar() ? 224 : 32;
        c.classes = tt_dataset_classes(d);
        must(ctx, tt_vit_new(ctx, m, &c));
    }
    must(ctx, tt_vit_name_classes(m, d));
    must(ctx, tt_vit_name_classes(m, held));
    if (opt.run.dropout >= 0) m->config.dropout = m->config.attention_dropout = (float)opt.run.dropout;
    freeze(ctx, opt.run.freeze);
}

/* For the micro-batches of two loaders, of one where the other is NULL, or of one image. total_steps 0: only
   to evaluate and predict. */
static tt_trainer *make_trainer(tt_context *ctx, const tt_vit *m, tt_loader *l, tt_loader *other,
                                int64_t total_steps)
{
    tt_model model = tt_vit_classifier(m);
    tt_train_options o = training_options(&opt.run, total_steps);
    o.max_seqs = 1;
    tt_train_options_make_room(&o, tt_loader_source(l), tt_loader_source(other));
    expect_micros(&o, opt.accumulate);
    return (tt_trainer *)made(ctx, tt_trainer_new(ctx, &model, &o));
}

/* ----------------------------------------------------------------------------------------------- training */
static tt_status keep(void *user) { return tt_vit_save((const tt_vit *)user, opt.run.out); }

/* Tests the best epoch's model as a user would: from its folder, in a context of its own. */
static void test(void)
{
    tt_context *ctx = open_training(&opt.run);
    images x;
    tt_vit m;
    must(ctx, tt_vit_load(ctx, &m, opt.run.out, 0, 0));
    read_images(ctx, &x, "test", opt.test);
    check_classes(x.d, "test on", &m, "those of the model");
    must(ctx, tt_vit_name_classes(&m, x.d));
    tt_loader *l = loader_of(ctx, x.d, &m, false);
    tt_trainer *t = make_trainer(ctx, &m, l, NULL, 0);
    show_test(ctx, t, tt_loader_source(l), m.class_names, m.config.classes, "images");
    printf("saved: %s\n", opt.run.out);
    tt_trainer_free(t), tt_loader_free(l), tt_vit_free(&m), free_images(&x), tt_close(ctx);
}

/* What would end the run at its end: test images that are not there or not of the classes to train on, or a
   saved run of other classes. */
static void check_before(const tt_dataset *d, const tt_vit *m)
{
    images x;
    tt_vit saved;
    if (!opt.data) return;
    tt_context *own = open_training(&opt.run);
    read_images(own, &x, "test", opt.test);
    check_classes(x.d, "test on", m, "those to train on");
    free_images(&x);
    if (opt.run.resume && holds(opt.run.out, "model.safetensors")) {
        must(own, tt_vit_load(own, &saved, opt.run.out, 0, 0));
        check_classes(d, "train on", &saved, "those of the run to resume");
        tt_vit_free(&saved);
    }
    tt_close(own);
}

static int train(void)
{
    if (!opt.run.plan) check_folder(opt.run.out, opt.run.resume, true);
    tt_context *ctx = open_training(&opt.run);
    images x;
    tt_vit m;
    read_images(ctx, &x, "train", opt.train);
    long long all = (long long)tt_dataset_count(x.d);
    int classes = tt_dataset_classes(x.d);
    if (all < 2 || classes < 2)
        die("'%s' has %lld images of %d classes to train on; two are the least", opt.data, all, classes);
    tt_dataset *held = (tt_dataset *)made(ctx, tt_dataset_split(x.d, (all + 10) / 11)); /* one of eleven */
    make_model(ctx, &m, x.d, held);
    weigh_classes(&opt.run, x.d);
    check_before(x.d, &m);
    const tt_model model = tt_vit_classifier(&m);
    if (opt.batch == CLI_WORD)
        opt.batch = largest_step(ctx, &model, &opt.run, opt.accumulate, 0, tt_dataset_count(x.d));
    tt_loader *l = loader_of(ctx, x.d, &m, true), *validation = loader_of(ctx, held, &m, false);
    if (!opt.epochs) opt.epochs = enough_epochs(tt_loader_steps(l), opt.model ? 3 : 12);
    tt_trainer *t = make_trainer(ctx, &m, l, validation, tt_loader_steps(l) * opt.epochs);
    long long others = (long long)tt_dataset_count(held);
    printf("%lld images to train on, %lld for validation; ", all - others, others);
    printf("%s, %d threads, %s\n", opt.model ? opt.model : "from scratch", tt_threads(ctx), tt_isa(ctx));
    show_classes(x.d, "images");
    show_plan(tt_trainer_program(t), opt.run.plan ? opt.run.out : NULL);

    bool finished = false;
    int result = 0;
    if (!opt.run.plan)
        result = fit(t, ctx, tt_loader_source(l), tt_loader_source(validation), &opt.run, opt.epochs, keep,
                     &m, &finished);
    if (finished) printf("waited %.1f s for images\n", tt_loader_waited(l));
    tt_trainer_free(t), tt_loader_free(l), tt_loader_free(validation);
    tt_vit_free(&m), tt_dataset_free(held), free_images(&x), tt_close(ctx);
    free(opt.run.weights);
    if (finished && !result) test();
    return result;
}

/* --------------------------------------------------------------------------------------------- prediction */
static void predict(void)
{
    tt_context *ctx = open_training(&opt.run);
    tt_vit m;
    tt_image image;
    tt_batch b;
    must(ctx, tt_vit_load(ctx, &m, opt.run.out, 0, 0));
    must_be_trained(opt.run.out, m.new_head);
    const tt_image_options prepared = tt_vit_image_options(&m);
    int side = m.config.image_size, best = 0;
    tt_trainer *t = make_trainer(ctx, &m, NULL, NULL, 0);
    const char *wrong = decode(opt.predict, &image);
    if (wrong && strstr(wrong, opt.predict)) die("%s", wrong);
    if (wrong) die("cannot read '%s': %s", opt.predict, wrong);
    uint8_t *pixels = (uint8_t *)made(NULL, malloc((size_t)side * (size_t)side * 3));
    float *probability = (float *)made(NULL, calloc((size_t)m.config.classes, sizeof *probability));
    must(ctx, tt_image_prepare(ctx, &image, &prepared, pixels));
    memset(&b, 0, sizeof b);
    b.seqs = 1;
    b.pixels = pixels;
    b.image_bytes = (int64_t)side * side * 3;
    must(ctx, tt_predict(t, &b, probability));
    for (int c = 1; c < m.config.classes; c++) if (probability[c] > probability[best]) best = c;
    printf("%s\t%.4f\t%s\n", m.class_names[best], probability[best], opt.predict);
    free(probability), free(pixels), free_pixels(NULL, &image);
    tt_trainer_free(t), tt_vit_free(&m), tt_close(ctx);
}

int main(int argc, char **argv)
{
    read_options(argc, argv);
    if (!opt.predict) return train();
    predict();
    return 0;
}
