/* Readers of IMDb's reviews, of CIFAR-10's images and of image files, with tinytrain's public API. A program
   includes this file after tinytrain.h.

   A reader that fails returns NULL and writes one sentence to `why`, with file, byte and reason. */
#ifndef EXAMPLES_DATASETS_H
#define EXAMPLES_DATASETS_H

#include "system.h"

#include <stdarg.h>

enum { DATASET_WHY = 1024 }; /* bytes of an error message */

/* Writes an error message to `why`, and returns false. */
TT_PRINTF(2, 3)
static inline bool dataset_fail(char why[DATASET_WHY], const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(why, DATASET_WHY, format, args);
    va_end(args);
    return false;
}

/* Reads a file of at most `max` bytes into memory and adds a NUL. The caller frees the memory. */
static inline char *dataset_file(const char *path, size_t max, size_t *bytes, char why[DATASET_WHY])
{
    file_info info = {false, false, 0};
    char *memory = NULL;
    bool ok = find_file(path, &info) || dataset_fail(why, "cannot open '%.500s': %s", path, strerror(errno));
    if (ok && !info.is_file) ok = dataset_fail(why, "'%.500s' is not a regular file", path);
    if (ok && info.bytes > max)
        ok = dataset_fail(why, "'%.500s' has %llu bytes, but at most %zu are possible", path, info.bytes,
                          max);
    size_t size = ok ? (size_t)info.bytes : 0;
    if (ok && !(memory = (char *)malloc(size + 1)))
        ok = dataset_fail(why, "out of memory for the %zu bytes of '%.500s': free memory", size, path);
    FILE *file = ok ? open_file(path, "rb") : NULL;
    if (ok && !file) ok = dataset_fail(why, "cannot open '%.500s': %s", path, strerror(errno));
    size_t got = ok ? fread(memory, 1, size, file) : 0;
    if (ok && got < size && ferror(file))
        ok = dataset_fail(why, "cannot read '%.500s' from byte %zu on: %s", path, got, strerror(errno));
    else if (ok && got < size)
        ok = dataset_fail(why, "'%.500s' ends at byte %zu, but was longer when it was opened: do not change "
                          "files that a run reads", path, got);
    if (file) fclose(file);
    if (ok) memory[*bytes = size] = 0;
    if (ok) return memory;
    free(memory);
    return NULL;
}

/* --------------------------------------------------------------------------------------------------- IMDb */

typedef struct imdb_review { char *path; int label; } imdb_review;
typedef struct imdb_list { imdb_review *reviews; int count, capacity; } imdb_list;

static const char *const imdb_classes[] = {"neg", "pos"};

static inline void imdb_list_free(imdb_list *l)
{
    for (int i = 0; i < l->count; i++) free(l->reviews[i].path);
    free(l->reviews);
}

static inline int imdb_order(const void *a, const void *b)
{ return strcmp(((const imdb_review *)a)->path, ((const imdb_review *)b)->path); }

static inline bool imdb_add(imdb_list *l, const char *folder, const char *name, int label,
                            char why[DATASET_WHY])
{
    size_t bytes = strlen(folder) + strlen(name) + 2;
    char *path = (char *)malloc(bytes);
    if (path && l->count == l->capacity) {
        int capacity = l->capacity ? 2 * l->capacity : 1024;
        void *more = realloc(l->reviews, (size_t)capacity * sizeof *l->reviews);
        if (!more) free(path), path = NULL;
        else l->reviews = (imdb_review *)more, l->capacity = capacity;
    }
    if (!path)
        return dataset_fail(why, "out of memory for the %d names in '%.500s': free memory", l->count + 1,
                            folder);
    snprintf(path, bytes, "%s/%s", folder, name);
    l->reviews[l->count].path = path;
    l->reviews[l->count++].label = label;
    return true;
}

/* A folder of reviews: the list that gets its files, its path, the class of its reviews, and the error.
   ok: no file was refused. */
typedef struct imdb_folder { imdb_list *l; const char *path; int label; char *why; bool ok; } imdb_folder;

/* Adds a file that is named NUMBER_RATING.txt. The rating is 1 to 4 (class 0, negative) or 7 to 10 (class 1,
   positive). A file that does not end with .txt is ignored. */
static inline bool imdb_file(void *arg, const char *name)
{
    imdb_folder *f = (imdb_folder *)arg;
    const char *rating = name + strspn(name, "0123456789");
    size_t bytes = strlen(name), digits = *rating == '_' ? strspn(rating + 1, "0123456789") : 0;
    if (bytes < 4 || strcmp(name + bytes - 4, ".txt") != 0) return true;
    int stars = digits == 1 || digits == 2 ? atoi(rating + 1) : 0, min = f->label ? 7 : 1;
    bool named = rating > name && rating + 1 + digits + 4 == name + bytes;
    if (named && stars >= min && stars <= min + 3) f->ok = imdb_add(f->l, f->path, name, f->label, f->why);
    else
        f->ok = dataset_fail(f->why, "'%.400s/%.200s' is not named NUMBER_RATING.txt with a rating from %s: "
                             "is the folder part of aclImdb?", f->path, name,
                             f->label ? "7 to 10" : "1 to 4");
    return f->ok;
}

/* Adds the reviews of a folder, whose class is `label`. */
static inline bool imdb_find(imdb_list *l, const char *folder, int label, char why[DATASET_WHY])
{
    imdb_folder f = {l, folder, label, why, true};
    const int before = l->count;
    bool ok = each_entry(folder, imdb_file, &f) ||
              dataset_fail(why, "cannot list the folder '%.500s': %s; expected the unpacked aclImdb_v1, with "
                           "train/neg, train/pos, test/neg, test/pos", folder, strerror(errno));
    ok = ok && f.ok;
    if (ok && l->count == before)
        ok = dataset_fail(why, "the folder '%.500s' holds no NUMBER_RATING.txt: expected the reviews of "
                          "aclImdb", folder);
    return ok;
}

/* Keeps n of the reviews from index `first` to the end, chosen at random by the seed of the context. Frees
   the other reviews from `first` on. */
static inline bool imdb_choose(tt_context *ctx, imdb_list *l, int first, int n, char why[DATASET_WHY])
{
    int there = l->count - first, kept = first;
    char(*number)[16] = (char(*)[16])calloc((size_t)there, sizeof *number);
    tt_text *texts = (tt_text *)calloc((size_t)there, sizeof *texts);
    bool ok = (number && texts) || dataset_fail(why, "out of memory for %d reviews: free memory", there);
    /* each text is the index of a review, so that a random split of the texts chooses reviews */
    for (int i = 0; i < there && ok; i++) {
        texts[i].bytes = (size_t)snprintf(number[i], sizeof number[i], "%d", i);
        texts[i].text = number[i];
    }
    tt_dataset *all = ok ? tt_dataset_texts(ctx, TT_TASK_CLASS, texts, there, imdb_classes, 1) : NULL;
    tt_dataset *chosen = all ? tt_dataset_split(all, n) : NULL;
    if (ok && !chosen) ok = dataset_fail(why, "%s", tt_error(ctx));
    for (int i = 0; i < n && ok; i++) texts[atoi(tt_dataset_text(chosen, i, NULL))].label = 1;
    for (int i = 0; i < there && ok; i++)
        if (texts[i].label) l->reviews[kept++] = l->reviews[first + i];
        else free(l->reviews[first + i].path);
    if (ok) l->count = kept;
    tt_dataset_free(chosen);
    tt_dataset_free(all);
    free(texts);
    free(number);
    return ok;
}

static inline tt_dataset *imdb_read(tt_context *ctx, const imdb_list *l, char why[DATASET_WHY])
{
    /* 1 MiB is enough: the longest review of the corpus has 14,000 bytes */
    const size_t max = (size_t)1 << 20;
    tt_text *texts = (tt_text *)calloc((size_t)l->count, sizeof *texts);
    bool ok = texts || dataset_fail(why, "out of memory for %d reviews: free memory", l->count);
    for (int i = 0; i < l->count && ok; i++) {
        texts[i].label = l->reviews[i].label;
        char *text = dataset_file(l->reviews[i].path, max, &texts[i].bytes, why);
        size_t begin = 0;
        texts[i].text = text;
        ok = text != NULL;
        if (ok && tt_text_begin(ctx, l->reviews[i].path, text, texts[i].bytes, &begin) != TT_OK)
            ok = dataset_fail(why, "%s", tt_error(ctx));
        if (ok && begin) memmove(text, text + begin, texts[i].bytes -= begin);
    }
    tt_dataset *d = ok ? tt_dataset_texts(ctx, TT_TASK_CLASS, texts, l->count, imdb_classes, 2) : NULL;
    if (ok && !d) dataset_fail(why, "%s", tt_error(ctx));
    for (int i = 0; texts && i < l->count; i++) free((void *)(uintptr_t)texts[i].text);
    free(texts);
    return d;
}

/* Reads the reviews folder/{train,test}/{neg,pos}/N_RATING.txt (Maas et al. 2011). split: "train" or "test".
   limit: number of reviews, half of each class, chosen at random by the context's seed; 0: all. The reviews
   have the order of classes (neg 0, pos 1) and, in a class, of file names in byte order. */
static inline tt_dataset *imdb_open(tt_context *ctx, const char *folder, const char *split, int limit,
                                    char why[DATASET_WHY])
{
    imdb_list l = {NULL, 0, 0};
    bool ok = split && (strcmp(split, "train") == 0 || strcmp(split, "test") == 0);
    if (!ok) dataset_fail(why, "IMDb has no split '%s': use \"train\" or \"test\"", split ? split : "NULL");
    if (ok && (limit < 0 || limit % 2))
        ok = dataset_fail(why, "a limit of %d reviews cannot be half negative and half positive: use an even "
                          "number, or 0 for all", limit);
    for (int c = 0; c < 2 && ok; c++) {
        char path[DATASET_WHY];
        int first = l.count, length = snprintf(path, sizeof path, "%s/%s/%s", folder, split, imdb_classes[c]);
        if (length >= (int)sizeof path)
            ok = dataset_fail(why, "the path '%.200s...' is too long: use a shorter one", path);
        if (ok) ok = imdb_find(&l, path, c, why);
        int there = l.count - first;
        if (ok && limit / 2 > there)
            ok = dataset_fail(why, "%d reviews, half of the limit, are needed from '%.500s', but it holds "
                              "only %d: use a limit of at most %d, or 0 for all", limit / 2, path, there,
                              2 * there);
        if (ok) qsort(l.reviews + first, (size_t)there, sizeof *l.reviews, imdb_order);
        if (ok && limit && limit / 2 < there) ok = imdb_choose(ctx, &l, first, limit / 2, why);
    }
    tt_dataset *d = ok ? imdb_read(ctx, &l, why) : NULL;
    imdb_list_free(&l);
    return d;
}

/* ----------------------------------------------------------------------------------------------- CIFAR-10 */

enum { CIFAR_CLASSES = 10, CIFAR_SIDE = 32, CIFAR_PLANE = CIFAR_SIDE * CIFAR_SIDE };
enum { CIFAR_PIXELS = 3 * CIFAR_PLANE };

/* The images of a CIFAR-10 dataset. The dataset reads the pixels here, so free the dataset first. */
typedef struct cifar {
    uint8_t *pixels; /* (images, CIFAR_PIXELS) */
    int *labels;     /* (images) */
    int count;
} cifar;

static inline void cifar_free(cifar *c)
{
    free(c->pixels);
    free(c->labels);
    memset(c, 0, sizeof *c);
}

static inline const char *cifar_image(void *user, int64_t index, tt_image *image)
{
    image->pixels = ((const cifar *)user)->pixels + index * CIFAR_PIXELS;
    image->height = image->width = CIFAR_SIDE;
    image->channels = 3;
    return NULL;
}

/* Adds the records of a file. A record is a label, then 32 x 32 pixels: all reds, all greens, all blues. */
static inline bool cifar_add(cifar *c, const char *path, const uint8_t *bytes, size_t size,
                             char why[DATASET_WHY])
{
    const size_t record = CIFAR_PIXELS + 1, records = size / record, max = INT32_MAX / CIFAR_PIXELS;
    if (!size || size % record || records > max - (size_t)c->count)
        return dataset_fail(why, "'%.500s' has %zu bytes, but must have a multiple of %zu: after %zu whole "
                            "images it breaks off at byte %zu, so copy it again", path, size, record, records,
                            records * record);
    size_t count = (size_t)c->count + records;
    void *labels = realloc(c->labels, count * sizeof *c->labels);
    if (labels) c->labels = (int *)labels;
    void *pixels = labels ? realloc(c->pixels, count * CIFAR_PIXELS) : NULL;
    if (!pixels)
        return dataset_fail(why, "out of memory for the %zu images up to '%.500s': free memory", count, path);
    c->pixels = (uint8_t *)pixels;
    for (size_t k = 0; k < records; k++, c->count++) {
        const uint8_t *from = bytes + k * record;
        uint8_t *to = c->pixels + (size_t)c->count * CIFAR_PIXELS;
        if (*from >= CIFAR_CLASSES)
            return dataset_fail(why, "'%.500s', byte %zu: the label is %d, but CIFAR-10 has labels 0 to 9: "
                                "copy the file again", path, k * record, *from);
        c->labels[c->count] = *from++;
        for (int p = 0; p < CIFAR_PLANE; p++)
            for (int colour = 0; colour < 3; colour++) *to++ = from[colour * CIFAR_PLANE + p];
    }
    return true;
}

/* Points `names` to the ten lines of a text, in which NULs replace the line ends. path: the text's file. */
static inline bool cifar_names(char *text, const char *path, const char *names[CIFAR_CLASSES],
                               char why[DATASET_WHY])
{
    int n = 0;
    for (; *(text += strspn(text, "\r\n")); n++) {
        if (n < CIFAR_CLASSES) names[n] = text;
        text += strcspn(text, "\r\n");
        if (*text) *text++ = 0;
    }
    return n == CIFAR_CLASSES ||
           dataset_fail(why, "'%.500s' has %d names, one a line, but must have the ten of CIFAR-10: copy it "
                        "again", path, n);
}

/* Reads a file of the folder, and sets `path` to its path. If the file does not exist, returns NULL without
   an error and sets *missing. */
static inline char *cifar_file(const char *folder, const char *name, char path[DATASET_WHY], size_t *bytes,
                               bool *missing, char why[DATASET_WHY])
{
    file_info info = {false, false, 0};
    *missing = false;
    if (snprintf(path, DATASET_WHY, "%s/%s", folder, name) >= DATASET_WHY)
        return dataset_fail(why, "the path '%.200s...' is too long: use a shorter one", path), NULL;
    if (find_file(path, &info)) return dataset_file(path, (size_t)1 << 30, bytes, why);
    *missing = errno == ENOENT;
    if (!*missing) dataset_fail(why, "cannot open '%.500s': %s", path, strerror(errno));
    return NULL;
}

/* Reads the binary version of CIFAR-10 (Krizhevsky 2009). Split "train" is the files data_batch_1.bin to
   data_batch_5.bin of the folder, of which some may be missing; "test" is test_batch.bin. Images are 32 x 32,
   RGB, in the order of the files. The names of classes are those in batches.meta.txt, or without that file
   "airplane" to "truck". Free c after the dataset. */
static inline tt_dataset *cifar_open(tt_context *ctx, cifar *c, const char *folder, const char *split,
                                     char why[DATASET_WHY])
{
    const char *names[CIFAR_CLASSES] = {"airplane", "automobile", "bird",  "cat",  "deer",
                                        "dog",      "frog",       "horse", "ship", "truck"};
    bool test = split && strcmp(split, "test") == 0, missing;
    bool ok = test || (split && strcmp(split, "train") == 0);
    char path[DATASET_WHY], name[32];
    size_t bytes;
    memset(c, 0, sizeof *c);
    if (!ok)
        dataset_fail(why, "CIFAR-10 has no split '%s': use \"train\" or \"test\"", split ? split : "NULL");
    char *meta = ok ? cifar_file(folder, "batches.meta.txt", path, &bytes, &missing, why) : NULL;
    if (ok) ok = meta ? cifar_names(meta, path, names, why) : missing;
    for (int k = 1; k <= (test ? 1 : 5) && ok; k++) {
        snprintf(name, sizeof name, test ? "test_batch.bin" : "data_batch_%d.bin", k);
        char *records = cifar_file(folder, name, path, &bytes, &missing, why);
        ok = records ? cifar_add(c, path, (const uint8_t *)records, bytes, why) : missing;
        free(records);
    }
    if (ok && !c->count)
        ok = dataset_fail(why, "the folder '%.500s' holds no %s: expected the unpacked binary version of "
                          "CIFAR-10, cifar-10-batches-bin", folder,
                          test ? "test_batch.bin" : "data_batch_1.bin to data_batch_5.bin");
    tt_image_source source;
    memset(&source, 0, sizeof source);
    source.count = c->count;
    source.labels = c->labels;
    source.class_names = names;
    source.classes = CIFAR_CLASSES;
    source.read = cifar_image;
    source.user = c;
    source.height = source.width = CIFAR_SIDE;
    source.channels = 3;
    tt_dataset *d = ok ? tt_dataset_images(ctx, &source) : NULL;
    if (ok && !d) dataset_fail(why, "%s", tt_error(ctx));
    free(meta);
    if (!d) cifar_free(c);
    return d;
}

/* -------------------------------------------------------------------------------------------- image files */

static inline bool is_pnm(const uint8_t *bytes, size_t n)
{
    return n >= 3 && bytes[0] == 'P' && (bytes[1] == '5' || bytes[1] == '6');
}

static inline bool pnm_space(uint8_t byte) { return byte == ' ' || (byte >= '\t' && byte <= '\r'); }

/* Reads a number of a PNM's header, which must end with white space. Returns -1 if there is no number. */
static inline int pnm_number(const uint8_t *bytes, size_t n, size_t *at)
{
    int64_t number = 0;
    while (*at < n && (bytes[*at] == '#' || pnm_space(bytes[*at])))
        if (bytes[*at] != '#') ++*at;
        else while (*at < n && bytes[*at] != '\n') ++*at;
    const size_t first = *at;
    while (*at < n && bytes[*at] >= '0' && bytes[*at] <= '9' && number < 1000000)
        number = 10 * number + bytes[(*at)++] - '0';
    return *at == first || *at == n || !pnm_space(bytes[*at]) ? -1 : (int)number;
}

/* Reads a binary PPM or PGM of 8 bits. image->pixels then points into `bytes`. Returns NULL, or words that
   say what is wrong. whole: `bytes` hold the whole file, not only its beginning. */
static inline const char *pnm_read(const uint8_t *bytes, size_t n, bool whole, tt_image *image)
{
    size_t at = 2;
    if (!is_pnm(bytes, n)) return "it is not a PPM or PGM";
    image->channels = bytes[1] == '6' ? 3 : 1;
    image->width = pnm_number(bytes, n, &at);
    image->height = pnm_number(bytes, n, &at);
    const int max = pnm_number(bytes, n, &at);
    const bool sides = image->width >= 1 && image->height >= 1 && image->width <= 65535 &&
                       image->height <= 65535;
    if (!sides || max != 255) return "the header is not that of a PPM or PGM of 8 bits";
    const size_t pixels = (size_t)image->width * (size_t)image->height * (size_t)image->channels;
    if (whole && n - at - 1 < pixels) return "the file ends before its last pixel";
    image->pixels = bytes + at + 1;
    return NULL;
}

/* Returns the orientation of a JPEG, as EXIF numbers orientations: 1 to 8. Returns 1 (upright) if the file
   has no orientation. */
static inline int jpeg_orientation(const uint8_t *bytes, size_t n)
{
    size_t at = 2, end;
    if (n < 2 || bytes[0] != 0xFF || bytes[1] != 0xD8) return 1;
    for (; at + 4 <= n && bytes[at] == 0xFF; at = end) {
        const int marker = bytes[at + 1];
        end = marker == 0xFF ? at + 1 : at + 2 + ((size_t)bytes[at + 2] << 8 | bytes[at + 3]);
        if (marker == 0xFF) continue; /* a fill byte */
        if (marker == 0xDA || end > n || end < at + 4) break;
        if (marker != 0xE1 || end < at + 18 || memcmp(bytes + at + 4, "Exif\0", 6) != 0) continue;
        const uint8_t *tiff = bytes + at + 10; /* EXIF counts offsets from here */
        const size_t size = end - at - 10;
        const size_t low = tiff[0] == 'I' ? 0 : 1; /* index of a number's low byte */
#define EXIF_2(p) ((size_t)tiff[(p) + low] | (size_t)tiff[(p) + 1 - low] << 8)
        const size_t first = low ? EXIF_2(4) << 16 | EXIF_2(6) : EXIF_2(6) << 16 | EXIF_2(4);
        const size_t entries = first + 2 <= size ? EXIF_2(first) : 0;
        for (size_t e = first + 2, k = 0; k < entries && e + 12 <= size; k++, e += 12)
            if (EXIF_2(e) == 0x0112 && EXIF_2(e + 8) >= 1 && EXIF_2(e + 8) <= 8) return (int)EXIF_2(e + 8);
#undef EXIF_2
        break;
    }
    return 1;
}

/* Turns an image upright. The image's pixels are from malloc. orientation: see jpeg_orientation. If memory
   runs out, returns false and leaves the image unchanged. */
static inline bool image_turn(tt_image *image, int orientation)
{
    const bool swap = orientation >= 5, up = orientation == 3 || orientation == 4 || orientation == 6 ||
               orientation == 7;
    const bool mirror = orientation == 2 || orientation == 3 || orientation == 7 || orientation == 8;
    const int H = image->height, W = image->width, height = swap ? W : H, width = swap ? H : W;
    const size_t channels = (size_t)image->channels;
    if (orientation == 1) return true;
    uint8_t *pixels = (uint8_t *)malloc((size_t)H * (size_t)W * channels), *to = pixels;
    if (!pixels) return false;
    for (int y = 0; y < height; y++)
        for (int x = 0; x < width; x++, to += channels) {
            const int row = swap ? x : y, column = swap ? y : x;
            const size_t from = (size_t)(up ? H - 1 - row : row) * (size_t)W +
                                (size_t)(mirror ? W - 1 - column : column);
            memcpy(to, image->pixels + from * channels, channels);
        }
    free((void *)(uintptr_t)image->pixels);
    image->pixels = pixels;
    image->height = height;
    image->width = width;
    return true;
}

#endif
