/* Trains a language model on conversations, or on pairs of answers, in the order of the file, and prints the
   losses, and of pairs the mean margin and accuracy of a step, as JSON on standard output. bench/chat_trl.py
   compares them with those of trl:

       build/chat_losses MODEL CHATS.jsonl STEPS BATCH LENGTH > tinytrain.json

   AdamW with learning rate 1e-3, for pairs 1e-4, decay 0.01 (not on norms), linear schedule without warm-up,
   clipping 1.0, fp32; a sequence is a conversation, cut to LENGTH tokens. Pairs have beta 0.1. */

#define TINYTRAIN_IMPLEMENTATION
#include "../tinytrain.h"

static int fail(tt_context *ctx)
{
    fprintf(stderr, "chat_losses: %s\n", tt_error(ctx));
    return 1;
}

int main(int argc, char **argv)
{
    if (argc != 6) return fprintf(stderr, "usage: chat_losses MODEL CHATS.jsonl STEPS BATCH LENGTH\n"), 2;
    const int steps = atoi(argv[3]);
    tt_context *ctx = tt_open(NULL);
    tt_lm m;
    if (!ctx) return 1;
    tt_stream_options so = tt_stream_options_default();
    tt_tokenizer *k = tt_tokenizer_load(ctx, argv[1]);
    so.tokenizer = k;
    tt_token_stream *s = k ? tt_token_stream_read(ctx, argv[2], &so) : NULL;
    if (!s || tt_lm_load(ctx, &m, argv[1]) != TT_OK) return fail(ctx);
    tt_token_loader_options lo = tt_token_loader_options_default();
    lo.batch = atoi(argv[4]);
    lo.length = atoi(argv[5]);
    lo.shuffle = false;
    lo.whole = true;
    tt_token_loader *l = tt_token_loader_new(ctx, s, &lo);
    const tt_source *source = tt_token_loader_source(l);
    const bool pairs = tt_token_stream_pairs(s);
    const tt_model model = pairs ? tt_lm_preference_model(&m) : tt_lm_model(&m);
    double margin = 0, accuracy = 0; /* sums over the steps */
    tt_train_options o = tt_train_options_default();
    o.schedule.total_steps = steps;
    o.schedule.lr = pairs ? 1e-4f : 1e-3f;
    tt_train_options_make_room(&o, source, NULL);
    tt_trainer *t = l ? tt_trainer_new(ctx, &model, &o) : NULL;
    if (!t || (pairs && tt_trainer_reference(t, source, NULL, NULL) != TT_OK)) return fail(ctx);
    printf("{\"losses\": [");
    for (int64_t step = 0; step < steps; step++) {
        tt_batch b;
        tt_stats stats;
        bool more;
        memset(&b, 0, sizeof b);
        if (step % source->steps == 0 && source->seek(source->self, step / source->steps, 0) != TT_OK)
            return fail(ctx);
        if (source->next(source->self, &b, &more) != TT_OK || tt_train_batch(t, &b, &stats, NULL) != TT_OK)
            return fail(ctx);
        printf("%s%.9g", step ? ", " : "", stats.loss);
        margin += stats.margin / stats.targets;
        accuracy += stats.correct / stats.targets;
    }
    printf("]");
    if (pairs) printf(", \"pairs\": [%.9g, %.9g]", margin / steps, accuracy / steps);
    printf("}\n");
    tt_trainer_free(t);
    tt_token_loader_free(l);
    tt_token_stream_free(s);
    tt_lm_free(&m);
    tt_tokenizer_free(k);
    tt_close(ctx);
    return 0;
}
