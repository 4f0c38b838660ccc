/* Prints the losses of the first training steps of a ViT folder on CIFAR-10, with images in the order of the
   files, in the format in which `bench/vit_cifar.py --losses` prints PyTorch's:

       build/vit_losses start/ cifar-10-batches-bin/ STEPS [precision [images in a step [learning rate]]]

   AdamW, decay 0.01 (not on biases, norms and the class token), cosine schedule with a tenth of the steps as
   warm-up, clipping 1.0. */

#define TINYTRAIN_IMPLEMENTATION
#include "../tinytrain.h"
#include "../examples/datasets.h"

static int fail(tt_context *ctx)
{
    fprintf(stderr, "vit_losses: %s\n", tt_error(ctx));
    return 1;
}

int main(int argc, char **argv)
{
    if (argc < 4) return fprintf(stderr, "usage: vit_losses START CIFAR STEPS [PRECISION [BATCH [LR]]]\n"), 2;
    tt_context *ctx = tt_open(NULL);
    tt_vit m;
    if (!ctx) return 1;
    cifar images;
    char why[DATASET_WHY];
    tt_dataset *d = cifar_open(ctx, &images, argv[2], "train", why);
    if (!d) return fprintf(stderr, "vit_losses: %s\n", why), 1;
    if (tt_vit_load(ctx, &m, argv[1], 0, 0) != TT_OK) return fail(ctx);
    tt_image_options image = tt_image_options_default(m.config.image_size, m.config.image_size);
    tt_loader_options lo = tt_loader_options_default();
    lo.batch = argc > 5 ? atoi(argv[5]) : 32;
    lo.shuffle = false;
    tt_loader *l = tt_image_loader_new(ctx, d, &image, &lo);
    if (!l) return fail(ctx);
    if (atoi(argv[3]) > tt_loader_steps(l))
        return fprintf(stderr, "vit_losses: '%s' has images for only %d steps: ask for fewer steps\n",
                       argv[2], (int)tt_loader_steps(l)),
               1;
    tt_model model = tt_vit_classifier(&m);
    tt_train_options o = tt_train_options_default();
    o.schedule.kind = TT_COSINE;
    o.schedule.lr = argc > 6 ? (float)atof(argv[6]) : 1e-3f;
    o.schedule.total_steps = atoi(argv[3]);
    o.schedule.warmup_steps = o.schedule.total_steps / 10;
    o.max_seqs = tt_loader_max_seqs(l);
    if (argc > 4) o.compile.precision = argv[4];
    tt_trainer *t = tt_trainer_new(ctx, &model, &o);
    if (!t) return fail(ctx);
    for (int64_t s = 0; s < o.schedule.total_steps; s++) {
        tt_batch b;
        tt_stats stats;
        if (!tt_loader_next(l, &b) || tt_train_batch(t, &b, &stats, NULL) != TT_OK) return fail(ctx);
        printf("step %d: loss %.6f, gradient norm %.4f\n", (int)s, stats.loss, stats.grad_norm);
    }
    tt_trainer_free(t);
    tt_loader_free(l);
    tt_dataset_free(d);
    cifar_free(&images);
    tt_vit_free(&m);
    tt_close(ctx);
    return 0;
}
