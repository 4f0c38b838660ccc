/* The logits that a saved (Distil)BERT classifier gives each line of standard input, with nine
   digits, tab separated:

       build/logits FOLDER < texts.txt

   bench/check_export.py compares them with what transformers computes from the same folder. */

#define TINYTRAIN_IMPLEMENTATION
#include "../tinytrain.h"

int main(int argc, char **argv)
{
    enum { MAX = 512 };
    int32_t ids[MAX], positions[MAX], types[MAX] = {0}, start[2] = {0, 0};
    float logits[64];
    char *line = NULL;
    size_t capacity = 0;
    tt_bert m;
    tt_inputs in;
    tt_context *ctx = argc == 2 ? tt_open(NULL) : NULL;
    if (!ctx) return fprintf(stderr, "usage: logits FOLDER < texts\n"), 2;
    tt_tokenizer *k = tt_tokenizer_load(ctx, argv[1]);
    tt_status status = k ? tt_bert_load(ctx, &m, argv[1], 0) : tt_error_code(ctx);
    if (status != TT_OK) return fprintf(stderr, "%s\n", tt_error(ctx)), 1;
    tt_compile_options o = tt_compile_options_default();
    tt_tape *t = tt_tape_new(ctx);
    int64_t rows = tt_axis(t, "tokens", MAX);
    o.train = false;
    in.ids = tt_input(t, "ids", TT_I32, rows, 1);
    in.positions = tt_input(t, "positions", TT_I32, rows, 1);
    in.types = tt_input(t, "types", TT_I32, rows, 1);
    in.seq_start = tt_seq_start(t, "seq_start", 1);
    in.first = tt_input(t, "first", TT_I32, 1, 1);
    tt_value root = tt_bert_logits(&m, t, &in);
    tt_program *p = tt_compile(t, root, &o);
    for (int r = 0; r < MAX; r++) positions[r] = r;
    for (ssize_t n; p && status == TT_OK && (n = getline(&line, &capacity, stdin)) >= 0;) {
        while (n > 0 && (line[n - 1] == '\n' || line[n - 1] == '\r')) n--;
        start[1] = tt_tokenize(k, line, (size_t)n, ids,
                               MAX < m.config.max_positions ? MAX : m.config.max_positions);
        if (status == TT_OK) status = tt_set(p, in.ids, ids, start[1]);
        if (status == TT_OK) status = tt_set(p, in.positions, positions, start[1]);
        if (status == TT_OK) status = tt_set(p, in.types, types, start[1]);
        if (status == TT_OK) status = tt_set(p, in.seq_start, start, 2);
        if (status == TT_OK) status = tt_set(p, in.first, start, 1);
        if (status == TT_OK) status = tt_run(p, NULL);
        if (status == TT_OK) status = tt_get(p, root, logits, 64);
        for (int c = 0; c < m.config.classes && status == TT_OK; c++)
            printf("%s%.9g", c ? "\t" : "", logits[c]);
        if (status == TT_OK) printf("\n");
    }
    if (!p || status != TT_OK) fprintf(stderr, "%s\n", tt_error(ctx));
    bool failed = !p || status != TT_OK;
    free(line);
    tt_program_free(p);
    tt_tape_free(t);
    tt_tokenizer_free(k);
    tt_bert_free(&m);
    tt_close(ctx);
    return failed;
}
