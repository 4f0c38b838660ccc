/* Trains a vision transformer to classify images.

   A small ViT from scratch, on images of ten shapes that the program draws:
       make build/vit_l16 && build/vit_l16
   ViT-L/16 on CIFAR-10:
       build/vit_l16 --data cifar-10-batches-bin --model vit-large-patch16-224/ --batch 16 --accumulate 4
   From scratch, on photos/{train,test}/CLASS/... or photos/CLASS/...:
       build/vit_l16 --data photos --vit S/16 --size 224 --augment
   On four GPUs, each with a quarter of the parameters, gradients and optimizer state:
       build/cuda/vit_l16 --data photos --vit L/16 --device cuda*4 --zero 3
   With as many images in a micro-batch as fit into 3 GB:
       build/cuda/vit_l16 --data photos --vit L/16 --device cuda --budget 3GB --batch max
   With less of the GPU's memory and more of the host's:
       build/cuda/vit_l16 --data photos --vit L/16 --device cuda --recompute blocks --offload optimizer
   Classify an image with the trained model:
       build/vit_l16 --out run --predict cat.jpg */

#define TINYTRAIN_IMPLEMENTATION
#include "../tinytrain.h"
#include "cli.h"
#include "classifier.h"
#include "images.h"

static struct {
    cli_training run; /* the options of all programs that train */
    const char *vit;
    int size;
    bool augment, skip_unreadable;
} opt = {.run = {CLI_CLASSIFIER_DEFAULT, .schedule = "cosine"}};

static void make_model(tt_context *ctx, tt_vit *m, tt_dataset *d, tt_dataset *held);
static classifier classifier_of(tt_vit *m);
static void test(void);
static void check_before(const tt_dataset *d, const classifier *c);

static int train(void)
{
    tt_context *ctx = begin_training(&opt.run, true);
    images x;
    tt_vit m;
    read_images(ctx, &opt.run, &x, "train", opt.skip_unreadable);
    tt_dataset *held = hold_out(ctx, &opt.run, &x.d, NULL, "images");
    make_model(ctx, &m, x.d, held);
    const classifier c = classifier_of(&m);
    check_before(x.d, &c);
    const int result = train_classifier(ctx, &c, x.d, held);
    tt_vit_free(&image_teacher), tt_vit_free(&m), tt_dataset_free(held), free_images(&x), tt_close(ctx);
    if (opt.run.finished && !result) test();
    return result;
}

/* -------------------------------------------------------------------------------------------------- model */
/* Makes the model to train: a checkpoint, or a ViT with random weights. */
static void make_model(tt_context *ctx, tt_vit *m, tt_dataset *d, tt_dataset *held)
{
    const bool cifar = is_cifar(opt.run.data);
    if (opt.run.model) {
        must(ctx, tt_vit_load(ctx, m, opt.run.model, opt.size, tt_dataset_classes(d)));
    } else {
        if (!opt.vit && opt.size == 224 && cifar) opt.vit = "L/16";
        tt_vit_config c = tt_vit_config_default(opt.vit ? opt.vit : "Ti/8");
        if (!opt.vit) c.hidden_size = 128, c.layers = 4, c.heads = 4, c.intermediate_size = 256;
        if (!c.hidden_size || c.patch_size < 1)
            die("--vit '%s' is unknown: use Ti, S, B, L or H, a slash and the size of a patch, such as S/16",
                opt.vit);
        c.image_size = opt.size ? opt.size : opt.vit && !cifar ? 224 : 32;
        c.classes = tt_dataset_classes(d);
        must(ctx, tt_vit_new(ctx, m, &c));
    }
    prepare_model(ctx, &opt.run, m, d, held);
}

static tt_loader *loader_of(tt_context *ctx, const void *self, const tt_dataset *d, bool train)
{
    const tt_loader_options o = loader_options(&opt.run, train);
    tt_image_options image = tt_vit_image_options((const tt_vit *)self);
    const int side = image.height, short_side = image.resize_shortest, tall = image.resize_height;
    image.flip = image.random_crop = train && opt.augment;
    /* pads the image so that the crop can shift the image by up to side / 8 pixels */
    if (image.random_crop) {
        const int lacks = side - (short_side ? short_side : tall ? tall : side);
        const int pad = (2 * (side / 8) + lacks + 1) / 2;
        image.pad = pad < 0 ? 0 : pad;
    }
    return (tt_loader *)made(ctx, tt_image_loader_new(ctx, d, &image, &o));
}

static tt_status keep(void *self) { return tt_vit_save((const tt_vit *)self, opt.run.out); }

static classifier classifier_of(tt_vit *m)
{
    const classifier c = {&opt.run, "images", opt.run.model ? 3 : 12, tt_vit_classifier(m), m->class_names, m,
                          loader_of, keep, prune_images};
    return c;
}

/* --------------------------------------------------------------------------------- testing and prediction */
/* Tests the best epoch's model as a user would: loads it from --out, in a new context. */
static void test(void)
{
    tt_context *ctx = open_training(&opt.run);
    images x;
    tt_vit m;
    must(ctx, tt_vit_load(ctx, &m, opt.run.out, 0, 0));
    read_images(ctx, &opt.run, &x, "test", opt.skip_unreadable);
    const classifier c = classifier_of(&m);
    check_classes(&opt.run, x.d, "test on", c.names, c.model.classes, "those of the model");
    must(ctx, tt_vit_name_classes(&m, x.d));
    test_classifier(ctx, &c, x.d);
    printf("saved: %s\n", opt.run.out);
    tt_vit_free(&m), free_images(&x), tt_close(ctx);
}

/* Finds errors that would otherwise show up only after training. Test images must exist, and must have the
   classes to train on. A run to resume must have these classes, too. */
static void check_before(const tt_dataset *d, const classifier *c)
{
    images x;
    tt_vit saved;
    if (!opt.run.data) return;
    tt_context *ctx = open_training(&opt.run);
    read_images(ctx, &opt.run, &x, "test", opt.skip_unreadable);
    check_classes(&opt.run, x.d, "test on", c->names, c->model.classes, "those to train on");
    free_images(&x);
    if (opt.run.resume && holds(opt.run.out, "model.safetensors")) {
        must(ctx, tt_vit_load(ctx, &saved, opt.run.out, 0, 0));
        check_classes(&opt.run, d, "train on", saved.class_names, saved.config.classes,
                      "those of the run to resume");
        tt_vit_free(&saved);
    }
    tt_close(ctx);
}

static int predict(void)
{
    check_trained(&opt.run);
    tt_context *ctx = open_training(&opt.run);
    tt_vit m;
    tt_image image;
    tt_batch b;
    must(ctx, tt_vit_load(ctx, &m, opt.run.out, 0, 0));
    const tt_image_options prepared = tt_vit_image_options(&m);
    const classifier c = classifier_of(&m);
    tt_trainer *t = predictor(ctx, &c, m.new_head);
    read_image(opt.run.predict, &image);
    memset(&b, 0, sizeof b);
    b.seqs = 1;
    b.image_bytes = (int64_t)prepared.height * prepared.width * prepared.channels;
    uint8_t *pixels = (uint8_t *)made(NULL, malloc((size_t)b.image_bytes));
    float *probability = (float *)made(NULL, calloc((size_t)c.model.classes, sizeof *probability));
    b.pixels = pixels;
    must(ctx, tt_image_prepare(ctx, &image, &prepared, pixels));
    must(ctx, tt_predict(t, &b, probability));
    show_prediction(&c, probability, c.model.classes, opt.run.predict);
    free(probability), free(pixels), free_pixels(NULL, &image);
    tt_trainer_free(t), tt_vit_free(&m), tt_close(ctx);
    return 0;
}

/* ------------------------------------------------------------------------------------------- command line */
static const cli_flag flags[] = {
    {"--data", "DIR", CLI_TEXT, &opt.run.data, .help = "cifar-10-batches-bin, or a folder of images: "
     "DIR/train/CLASS/FILE and DIR/test/..., or DIR/CLASS/FILE, of " FORMATS " (none: shapes, drawn here)"},
    {"--skip-unreadable", "", CLI_SWITCH, &opt.skip_unreadable,
     .help = "decode each file before training, and leave out files that cannot be read, instead of "
     "stopping"},
    {"--model", "PATH", CLI_TEXT, &opt.run.model, .help = "checkpoint to start from: a folder or a "
     ".safetensors file, of transformers or torchvision (none: from scratch)"},
    {"--vit", "SIZE", CLI_TEXT, &opt.vit,
     .help = "without --model: Ti/16, S/16, B/16, L/16 or H/14, or with patches of another size (L/16 for "
     "CIFAR-10 at --size 224, else a small one)"},
    {"--size", "N", CLI_INTEGER, &opt.size,
     .help = "height and width to which images are resized for the model (0: as the model says; from scratch "
     "32, or with --vit 224, but 32 for CIFAR-10)", .max = 16384},
    {"--augment", "", CLI_SWITCH, &opt.augment,
     .help = "shift training images by up to an eighth and mirror them at random"},
    {"--batch", "N", CLI_INTEGER, &opt.run.batch,
     .help = "images in a step; max: as many as --budget or, without it, a GPU's memory allows (0: 16 with "
     "--model, else 20)", .max = 65536, .choices = "max"},
    CLI_CLASSIFIER_FLAGS(opt.run, "images", "3 with --model, else 12", "5e-5 with --model, else 1e-3",
                         "accuracy f1_macro loss"),
    {"--predict", "FILE", CLI_TEXT, &opt.run.predict,
     .help = "classify an image file with the model in --out"},
};

int main(int argc, char **argv)
{
    cli_parse(argc, argv, flags, CLI_COUNT(flags), "vit_l16",
              "Trains a vision transformer to classify images.");
    if (opt.run.lr == 0) opt.run.lr = opt.run.model ? 5e-5 : 1e-3;
    if (!opt.run.batch) opt.run.batch = opt.run.model ? 16 : 20;
    check_training(&opt.run);
    opt.run.beside = opt.augment; /* each epoch has other images */
    if (opt.augment && opt.run.features_once) die("--augment changes images, so leave out --features-once");
    if (opt.run.model && opt.vit)
        die("--vit is for training from scratch, but --model has its own size: leave one out");
    return opt.run.predict ? predict() : train();
}
