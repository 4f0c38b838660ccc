/* Fuzzes metrics.csv of a run that is resumed. The run continues and keeps the lines up to its last step, and
   another resume leaves the written file unchanged.

   Input: a byte; the file. If the byte is odd, the library's current heading precedes the file. */
#include "run.h"

static size_t lines_of(const fuzz_file *f)
{
    size_t lines = 0;
    for (size_t k = 0; k < f->n; k++) lines += f->bytes[k] == '\n';
    return lines;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n)
{
    static const volatile int stop = 1;
    static uint8_t state[8192], heading[512];
    static size_t state_bytes, heading_bytes;
    fuzz_run *r = fuzz_run_get();
    tt_progress progress;
    bool finished;
    fuzz_remove_all();
    if (!state_bytes) { /* saves the state after one step of three */
        tt_batch b;
        FUZZ_CHECK(tt_loader_next(r->train, &b) && tt_train_batch(r->t, &b, NULL, NULL) == TT_OK);
        memset(&progress, 0, sizeof progress);
        progress.step = 1;
        progress.best = -1;
        FUZZ_CHECK(tt_trainer_save(r->t, "run/state.safetensors", &progress) == TT_OK);
        state_bytes = fuzz_find("run/state.safetensors")->n;
        FUZZ_CHECK(state_bytes < sizeof state);
        memcpy(state, fuzz_find("run/state.safetensors")->bytes, state_bytes);
        FUZZ_CHECK(fuzz_run_fit(r, 1, true, NULL, &finished) == TT_OK);
        const uint8_t *csv = fuzz_find("run/metrics.csv")->bytes;
        heading_bytes = (size_t)((const uint8_t *)memchr(csv, '\n', sizeof heading) + 1 - csv);
        memcpy(heading, csv, heading_bytes);
    }
    fuzz_write("run/state.safetensors", state, state_bytes);
    fuzz_input in = {bytes, n};
    bool headed = fuzz_byte(&in) % 2 != 0;
    fuzz_write("run/metrics.csv", heading, headed ? heading_bytes : 0);
    fuzz_append(fuzz_find("run/metrics.csv"), in.at, in.left);
    fuzz_refused = false;
    if (fuzz_ok(r->ctx, fuzz_run_fit(r, 1, true, NULL, &finished) == TT_OK)) {
        const fuzz_file *svg = fuzz_find("run/loss.svg"), *csv = fuzz_find("run/metrics.csv");
        FUZZ_CHECK(finished && svg && svg->n > 12 && memcmp(svg->bytes, "<svg ", 5) == 0 &&
                   memcmp(svg->bytes + svg->n - 7, "</svg>\n", 7) == 0);
        FUZZ_CHECK(!memchr(svg->bytes, 0, svg->n));
        FUZZ_CHECK(csv && csv->n && memcmp(csv->bytes, "step,", 5) == 0 && csv->bytes[csv->n - 1] == '\n' &&
                   lines_of(csv) >= 4); /* the heading, two steps and a validation */

        /* A run that is stopped before its first step reads metrics.csv and writes the same bytes. */
        fuzz_write("before", csv->bytes, csv->n);
        FUZZ_CHECK(fuzz_run_fit(r, 2, true, &stop, &finished) == TT_OK && !finished &&
                   fuzz_same_files("before", "run/metrics.csv"));
    }
    return 0;
}
