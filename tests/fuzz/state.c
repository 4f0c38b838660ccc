/* Fuzzes the state of a run. A state that loads does not change if it is saved and loaded again. A state that
   does not load changes nothing. A run continues from the state or says why not.

   Input: edits of a state that was just saved, so that inputs stay useful when the format changes. An edit
   consists of a number of two bytes (the position of the edit), a byte (the kind of edit: overwrite, insert
   or delete, and whether the header's length is kept or corrected), a byte (how many bytes are overwritten,
   inserted or deleted), and the bytes to write. */
#include "run.h"

static void edit(fuzz_file *f, fuzz_input *in)
{
    size_t at = (size_t)fuzz_number(in), n, end;
    int what = fuzz_byte(in);
    uint64_t header;
    at = f->n ? at % f->n : 0;
    n = (size_t)fuzz_byte(in);
    if (n > in->left) n = in->left;
    if (what % 3 == 0) { /* overwrite */
        if (at + n > f->n) n = f->n - at;
        memcpy(f->bytes + at, in->at, n);
    } else if (what % 3 == 1) {    /* insert */
        fuzz_append(f, in->at, n); /* makes room */
        memmove(f->bytes + at + n, f->bytes + at, f->n - n - at);
        memcpy(f->bytes + at, in->at, n);
        memcpy(&header, f->bytes, 8);
        header += n;
        if (what < 128 && at >= 8) memcpy(f->bytes, &header, 8);
    } else { /* delete */
        end = at + n > f->n ? f->n : at + n;
        memcpy(&header, f->bytes, 8);
        header -= end - at;
        if (what < 128 && at >= 8) memcpy(f->bytes, &header, 8);
        memmove(f->bytes + at, f->bytes + end, f->n - end);
        f->n -= end - at;
    }
    if (what % 3 != 2) {
        in->at += n;
        in->left -= n;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n)
{
    static tt_progress start; /* zeros, except for fields that are set below */
    static uint8_t good[8192];
    static size_t good_bytes;
    fuzz_run *r = fuzz_run_get();
    fuzz_input in = {bytes, n};
    tt_progress progress;
    fuzz_remove_all();
    if (!good_bytes) { /* saves the state after one step */
        tt_batch b;
        start.step = 1;
        start.loss_sum = 0.5;
        start.targets = 2;
        start.best = 0.25;
        FUZZ_CHECK(tt_loader_next(r->train, &b) && tt_train_batch(r->t, &b, NULL, NULL) == TT_OK);
        FUZZ_CHECK(tt_trainer_save(r->t, "good", &start) == TT_OK);
        good_bytes = fuzz_find("good")->n;
        FUZZ_CHECK(good_bytes > 8 && good_bytes < sizeof good);
        memcpy(good, fuzz_find("good")->bytes, good_bytes);
    }
    fuzz_write("good", good, good_bytes);
    FUZZ_CHECK(tt_trainer_load(r->t, "good", &progress) == TT_OK &&
               memcmp(&progress, &start, sizeof start) == 0);
    fuzz_write("run/state.safetensors", good, good_bytes);
    while (in.left >= 4) edit(fuzz_find("run/state.safetensors"), &in);

    fuzz_refused = false;
    if (fuzz_ok(r->ctx, tt_trainer_load(r->t, "run/state.safetensors", &progress) == TT_OK)) {
        FUZZ_CHECK(tt_trainer_save(r->t, "a", &progress) == TT_OK &&
                   tt_trainer_load(r->t, "a", &progress) == TT_OK);
        FUZZ_CHECK(tt_trainer_save(r->t, "b", &progress) == TT_OK && fuzz_same_files("a", "b"));
        bool finished;
        tt_status status = fuzz_run_fit(r, 1, true, NULL, &finished);
        if (fuzz_ok(r->ctx, status == TT_OK)) {
            bool was_over = progress.epoch == 1; /* a run that is over writes no file */
            FUZZ_CHECK(finished && (was_over || (fuzz_find("run/metrics.csv") && fuzz_find("run/loss.svg"))));
        }
    } else {
        tt_progress unchanged = start;
        FUZZ_CHECK(tt_trainer_save(r->t, "a", &unchanged) == TT_OK && fuzz_same_files("a", "good"));
    }
    return 0;
}
