/* Prints the logits that a saved model gives for each line of standard input, tab-separated, with nine
   digits:

       build/logits FOLDER < texts.txt               a line is a text, for a BERT or DistilBERT classifier
       build/logits --ids FOLDER < ids.txt           a line is the token ids of a text, separated by spaces;
                                                     a language model, masked or not, or a tagger prints a
                                                     line for each token, any other text model a line for
                                                     each text; a model without classifier prints embeddings
       build/logits --ids FOLDER COPY < ids.txt      also saves the model, an encoder of texts, as COPY
       build/logits --ids FOLDER ADAPTER COPY < ids.txt
                                                     with the adapter of a peft folder, which is also saved as
                                                     COPY

   bench/check_export.py, check_logits.py and check_heads.py compare the logits with those that transformers
   computes from the same folder. */

#define TINYTRAIN_IMPLEMENTATION
#include "../tinytrain.h"

enum { MAX = 4096 };

typedef struct model {
    tt_context *ctx;
    tt_bert bert;
    tt_lm lm;
    tt_inputs in;
    tt_tape *tape;
    tt_program *program;
    tt_value root;
    int max, classes;
    bool is_lm, per_token;
} model;

static void check(tt_context *ctx, tt_status status)
{
    if (status == TT_OK) return;
    fprintf(stderr, "%s\n", tt_error(ctx));
    exit(1);
}

static void load(model *m, const char *folder, const char *adapter, const char *copy)
{
    tt_status status = tt_lm_load(m->ctx, &m->lm, folder);
    m->is_lm = m->per_token = status == TT_OK;
    const bool other = status == TT_ERR_UNSUPPORTED && strstr(tt_error(m->ctx), "this loader reads");
    if (other) status = tt_bert_load(m->ctx, &m->bert, folder, 0);
    check(m->ctx, status);
    if (adapter) check(m->ctx, tt_lm_lora_load(&m->lm, adapter));
    if (copy) check(m->ctx, m->is_lm ? tt_lm_lora_save(&m->lm, copy) : tt_bert_save(&m->bert, copy));
    const tt_bert_config *c = &m->bert.config;
    const bool embeds = c->task == TT_TASK_EMBED;
    const bool masked = !m->is_lm && c->task == TT_TASK_MASKED_LM;
    if (!m->is_lm) m->per_token = masked || c->task == TT_TASK_TAGS;
    const int positions = m->is_lm ? m->lm.config.max_positions : c->max_positions;
    m->max = positions < MAX ? positions : MAX;
    m->classes = embeds ? c->hidden_size : masked ? c->vocab_size : c->classes;
    if (m->is_lm) m->classes = m->lm.config.vocab_size;
    tt_compile_options o = tt_compile_options_default();
    o.train = false;
    tt_tape *t = m->tape = tt_tape_new(m->ctx);
    const int64_t rows = tt_axis(t, "tokens", m->max);
    m->in.ids = tt_input(t, "ids", TT_I32, rows, 1);
    m->in.positions = tt_input(t, "positions", TT_I32, rows, 1);
    m->in.masked = m->in.positions; /* the model returns logits of these rows: all */
    if (!m->is_lm) m->in.types = tt_input(t, "types", TT_I32, rows, 1);
    m->in.seq_start = tt_seq_start(t, "seq_start", 1);
    if (!m->is_lm) m->in.first = tt_input(t, "first", TT_I32, 1, 1);
    m->root = m->is_lm ? tt_lm_logits(&m->lm, t, &m->in)
              : embeds ? tt_bert_embed(&m->bert, t, &m->in)
                       : tt_bert_logits(&m->bert, t, &m->in);
    m->program = tt_compile(t, m->root, &o);
    if (!m->program) check(m->ctx, tt_error_code(m->ctx));
}

static void print_logits(model *m, const int32_t *ids, int count, float *logits)
{
    static int32_t positions[MAX], types[MAX];
    const int32_t start[2] = {0, count};
    const int lines = m->per_token ? count : 1;
    tt_program *p = m->program;
    for (int r = 0; r < count; r++) positions[r] = r;
    check(m->ctx, tt_set(p, m->in.ids, ids, count));
    check(m->ctx, tt_set(p, m->in.positions, positions, count));
    if (!m->is_lm) check(m->ctx, tt_set(p, m->in.types, types, count));
    check(m->ctx, tt_set(p, m->in.seq_start, start, 2));
    if (!m->is_lm) check(m->ctx, tt_set(p, m->in.first, start, 1));
    check(m->ctx, tt_run(p, NULL));
    check(m->ctx, tt_get(p, m->root, logits, (int64_t)m->max * m->classes));
    for (int r = 0; r < lines; r++) {
        for (int c = 0; c < m->classes; c++)
            printf("%s%.9g", c ? "\t" : "", (double)logits[(size_t)r * (size_t)m->classes + (size_t)c]);
        printf("\n");
    }
}

int main(int argc, char **argv)
{
    static int32_t ids[MAX];
    static model m;
    char *line = NULL;
    size_t capacity = 0;
    const bool by_ids = argc > 1 && strcmp(argv[1], "--ids") == 0;
    const int given = argc - 1 - by_ids;
    m.ctx = given == 1 || ((given == 2 || given == 3) && by_ids) ? tt_open(NULL) : NULL;
    if (!m.ctx)
        return fprintf(stderr, "usage: logits FOLDER < texts, logits --ids FOLDER [[ADAPTER] COPY] < ids\n"),
               2;
    const char *folder = argv[1 + by_ids];
    load(&m, folder, given == 3 ? argv[3] : NULL, given > 1 ? argv[given + 1] : NULL);
    tt_tokenizer *k = by_ids ? NULL : tt_tokenizer_load(m.ctx, folder);
    float *logits = (float *)malloc(sizeof *logits * (size_t)m.max * (size_t)m.classes);
    if ((!by_ids && !k) || !logits) check(m.ctx, k ? TT_ERR_MEMORY : tt_error_code(m.ctx));
    for (ssize_t n; (n = getline(&line, &capacity, stdin)) >= 0;) {
        int count = 0;
        while (n > 0 && (line[n - 1] == '\n' || line[n - 1] == '\r')) n--;
        if (k) count = tt_tokenize(k, line, (size_t)n, ids, m.max < 512 ? m.max : 512);
        for (char *at = line, *next; by_ids && count < m.max; at = next, count++) {
            ids[count] = (int32_t)strtol(at, &next, 10);
            if (next == at) break;
        }
        print_logits(&m, ids, count, logits);
    }
    free(line);
    free(logits);
    tt_program_free(m.program);
    tt_tape_free(m.tape);
    tt_tokenizer_free(k);
    if (m.is_lm) tt_lm_free(&m.lm);
    else tt_bert_free(&m.bert);
    tt_close(m.ctx);
    return 0;
}
