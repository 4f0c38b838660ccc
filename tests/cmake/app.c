/* Does one step of a linear classifier, and prints the version. */
#include <stdio.h>
#include <tinytrain.h>

int main(void)
{
    tt_context *ctx = tt_open(NULL);
    if (!ctx) return 1;
    float features[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    int32_t classes[2] = {0, 1};
    int64_t shape[2] = {2, 4};
    tt_init zeros = {TT_INIT_ZEROS, 0};
    tt_param *w = tt_param_new(ctx, "w", 2, shape, zeros);
    tt_tape *t = tt_tape_new(ctx);
    tt_value x = tt_input(t, "x", TT_F32, 2, 4), y = tt_input(t, "y", TT_I32, 2, 1);
    tt_program *p = tt_compile(t, tt_cross_entropy(t, tt_linear(t, x, w, NULL), y, NULL), NULL);
    tt_stats stats;
    bool good = p && tt_set(p, x, features, 2) == TT_OK && tt_set(p, y, classes, 2) == TT_OK;
    /* The loss is log 2, because parameters of 0 give both classes the same probability. */
    good = good && tt_step(p, 1e-3f, &stats) == TT_OK && stats.loss > 0.69 && stats.loss < 0.70;
    puts(good ? TT_VERSION : tt_error(ctx));
    tt_program_free(p);
    tt_tape_free(t);
    tt_close(ctx);
    return !good;
}
