#include "manual.h"

/* Under -std=c99 the C library's headers declare POSIX functions (sigset_t, clock_gettime, pread) and syscall
   only if a macro asks for them before the first system header. In glibc and musl the first system header
   defines _FEATURES_H. Whether the headers declare POSIX shows in __USE_MISC and __USE_XOPEN2K8 (glibc) or
   _GNU_SOURCE and _BSD_SOURCE (musl). */
#if defined(TINYTRAIN_IMPLEMENTATION) && defined(_FEATURES_H) && \
    !(defined(__USE_MISC) && defined(__USE_XOPEN2K8)) && \
    (defined(__GLIBC__) || !(defined(_GNU_SOURCE) || defined(_BSD_SOURCE)))
#error "tinytrain: headers before this one hide POSIX: include it first, or use -D_GNU_SOURCE or -std=gnu99"
#undef TINYTRAIN_IMPLEMENTATION /* so that no other error follows */
#endif
#if defined(TINYTRAIN_IMPLEMENTATION) && !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#if defined(TINYTRAIN_IMPLEMENTATION) && defined(__MINGW32__)
/* MinGW's C library has printf as C99 defines it only if this macro is 1 before the first system header. */
#if defined(_INC_STDIO) && !defined(_UCRT) && !(defined(__USE_MINGW_ANSI_STDIO) && __USE_MINGW_ANSI_STDIO)
#error "tinytrain: headers before this one chose Microsoft's printf: include it first, or use -std=c99"
#undef TINYTRAIN_IMPLEMENTATION
#elif !defined(__USE_MINGW_ANSI_STDIO)
#define __USE_MINGW_ANSI_STDIO 1
#endif
#endif
#ifdef TT__ELSEWHERE /* the Makefile compiles the implementation once for all examples */
#undef TINYTRAIN_IMPLEMENTATION
#endif

#ifndef TINYTRAIN_H
#define TINYTRAIN_H

#include "api/standard.h"

#ifdef __cplusplus
extern "C" {
#endif

#include "api/context.h"
#include "api/params.h"
#include "api/tape.h"
#include "api/program.h"
#include "api/files.h"
#include "api/tokenizer.h"
#include "api/data.h"
#include "api/models.h"
#include "api/trainer.h"

#ifdef __cplusplus
}
#endif

#endif /* TINYTRAIN_H */

/* ===========================================================================================================
   BACKEND API                                                                                    src/backend/
   The data with which a backend (the CPU's below, or tinytrain_cuda.cu) runs one instruction, and the
   functions that a backend has. Uses the public API only. A file that implements a backend defines
   TINYTRAIN_BACKEND before it includes the header.
   ======================================================================================================== */

#if (defined(TINYTRAIN_IMPLEMENTATION) || defined(TINYTRAIN_BACKEND)) && !defined(TT__LANES) && \
    !defined(TT__BACKEND_API)
#define TT__BACKEND_API
#include "backend/launch.h"
#include "backend/ops.h"
#include "backend/functions.h"

#endif /* TT__BACKEND_API */

#if defined(TINYTRAIN_IMPLEMENTATION) && !defined(TT__LANES) && !defined(TT__IMPLEMENTED)
#define TT__IMPLEMENTED
#define TT__IMPLEMENT /* defined until the end of this inclusion of the file */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmissing-field-initializers" /* initialisers leave out fields that are 0 */
#ifdef __cplusplus /* C has no other casts */
#pragma GCC diagnostic ignored "-Wold-style-cast"
#endif
#if defined(TT__KERNELS_ONLY) || defined(TT__KERNELS_ELSEWHERE) /* a part of the code leaves helpers unused */
#pragma GCC diagnostic ignored "-Wunused-function"
#endif

#if defined(__FAST_MATH__) && !defined(TINYTRAIN_ALLOW_FAST_MATH)
#error "tinytrain: -ffast-math (or -Ofast) breaks NaN checks and rounding; build without it, or define \
TINYTRAIN_ALLOW_FAST_MATH"
#endif
#ifndef TINYTRAIN_FILENAME
#define TINYTRAIN_FILENAME "tinytrain.h"
#endif

#include "base/system.h"
#include "base/on_posix.h"
#include "base/on_windows.h"
#include "base/text.h"
#include "base/context.h"
#include "base/memory.h"
#include "base/numbers.h"
#include "base/codes.h"
#include "base/functions.h"
#include "base/random.h"
#include "base/threads.h"
#include "base/machine.h"
#include "base/hooks.h"
#include "base/files.h"
#include "tape/tape.h"
#include "tape/record.h"
#include "tape/edit.h"
#include "ops/record.h"
#include "ops/shapes.h"
#include "ops/layouts.h"
#include "ops/gradients.h"
#include "ops/scratch.h"
#include "ops/linear/rules.h"
#include "ops/fp8/rules.h"
#include "ops/embedding/rules.h"
#include "ops/norm/rules.h"
#include "ops/elementwise/rules.h"
#include "ops/attention/rules.h"
#include "ops/rows/rules.h"
#include "ops/custom/rules.h"
#include "ops/losses/rules.h"
#include "ops/casts/rules.h"
#include "ops/optimizers/map8.h"
#include "ops/optimizers/adafactor.h"
#include "ops/optimizers/rules.h"
#include "ops/collectives/rules.h"
#include "ops/rules.h"
#include "passes/verify.h"
#include "passes/differentiate.h"
#include "passes/rows.h"
#include "passes/tensor.h"
#include "passes/fuse.h"
#include "passes/round.h"
#include "passes/precision.h"
#include "passes/recompute.h"
#include "passes/step.h"
#include "passes/stages.h"
#include "passes/data.h"
#include "passes/muon.h"
#include "passes/update.h"
#include "passes/fp8.h"
#include "passes/offload.h"
#include "passes/prune.h"
#include "passes/features.h"
#include "passes/overlap.h"
#include "passes/join.h"
#include "plan/place.h"
#include "cpu/isa.h"
#include "ops/linear/cpu_shared.h"
#include "ops/attention/cpu_shared.h"
#include "ops/cpu_launch.h"
#include "ops/collectives/cpu_shared.h"
#include "ops/cpu_draw.h"
#include "cpu/variants.h"

#endif /* TT__IMPLEMENT */

#ifdef TT__LANES

#include "cpu/kernels.h"
#ifndef TT__KERNELS_ELSEWHERE

#include "cpu/vectors.h"
#include "cpu/halves.h"
#include "cpu/rows.h"
#include "ops/linear/cpu_packing.h"
#include "ops/linear/cpu_computing.h"
#include "ops/linear/cpu_products.h"
#include "ops/attention/cpu_blocks.h"
#include "ops/attention/cpu_softmax.h"
#include "ops/attention/cpu_kernels.h"
#include "ops/cpu_rows.h"
#include "ops/elementwise/cpu.h"
#include "ops/casts/cpu.h"
#include "ops/cpu_column_sums.h"
#include "ops/linear/cpu.h"
#include "ops/attention/cpu.h"
#include "ops/norm/cpu.h"
#include "ops/embedding/cpu.h"
#include "ops/rows/cpu.h"
#include "ops/custom/cpu.h"
#include "ops/losses/cpu.h"
#include "ops/optimizers/cpu.h"
#include "ops/optimizers/cpu_prune.h"
#include "ops/collectives/cpu.h"
#include "ops/kernels.h"

#endif /* TT__KERNELS_ELSEWHERE */

#include "cpu/undo.h"

#endif /* TT__LANES */

#if defined(TT__IMPLEMENT) && !defined(TT__LANES) && !defined(TT__KERNELS_ONLY)

#include "ranks/threads.h"
#include "ranks/processes.h"
#include "ranks/mpi.h"
#include "ranks/groups.h"
#include "ranks/collectives.h"
#include "ranks/net.h"
#include "context/memory.h"
#include "context/cpu.h"
#include "context/devices.h"
#include "context/coded.h"
#include "context/context.h"
#include "context/params.h"
#include "context/low_rank.h"
#include "compile/program.h"
#include "compile/passes.h"
#include "compile/settings.h"
#include "compile/build.h"
#include "compile/choice.h"
#include "compile/search.h"
#include "compile/compile.h"
#include "compile/batch.h"
#include "run/ranks.h"
#include "run/memory.h"
#include "run/inputs.h"
#include "run/collectives.h"
#include "run/processes.h"
#include "run/stages.h"
#include "run/launch.h"
#include "run/tune.h"
#include "run/results.h"
#include "run/pipeline.h"
#include "run/step.h"
#include "run/state.h"
#include "reports/measure.h"
#include "reports/plan.h"
#include "reports/text.h"
#include "reports/picture.h"
#include "reports/program.h"
#include "text/code_points.h"
#include "text/unicode.h"
#include "files/lists.h"
#include "files/utf8.h"
#include "files/json.h"
#include "files/safetensors.h"
#include "text/types.h"
#include "text/lookups.h"
#include "text/encoder.h"
#include "text/normalize.h"
#include "text/split.h"
#include "text/wordpiece.h"
#include "text/bpe.h"
#include "text/unigram.h"
#include "text/encode.h"
#include "text/decode.h"
#include "text/read.h"
#include "text/template.h"
#include "text/vocabulary.h"
#include "text/read_models.h"
#include "text/added.h"
#include "text/build.h"
#include "text/vocab_txt.h"
#include "text/folders.h"
#include "text/jinja.h"
#include "text/jinja_run.h"
#include "text/chat.h"
#include "data/resize.h"
#include "data/dataset.h"
#include "data/labels.h"
#include "data/tables.h"
#include "data/rows.h"
#include "data/read.h"
#include "data/dealer.h"
#include "data/images.h"
#include "data/masks.h"
#include "data/loader.h"
#include "data/divide.h"
#include "text/save.h"
#include "data/stream.h"
#include "data/chats.h"
#include "data/windows.h"
#include "models/layout.h"
#include "models/few_bits.h"
#include "models/bitsandbytes.h"
#include "models/load.h"
#include "models/save.h"
#include "models/config.h"
#include "models/model.h"
#include "models/checkpoint.h"
#include "models/classifier.h"
#include "models/bert_layout.h"
#include "models/big_bird.h"
#include "models/embedder.h"
#include "models/bert.h"
#include "models/vit.h"
#include "models/lm_layout.h"
#include "models/lm_config.h"
#include "models/lm.h"
#include "models/adapters.h"
#include "models/lm_tape.h"
#include "models/prune.h"
#include "models/preferences.h"
#include "models/generate.h"
#include "train/features.h"
#include "train/grad_cache.h"
#include "train/teacher.h"
#include "train/trainer.h"
#include "train/importance.h"
#include "train/metrics.h"
#include "train/evaluate.h"
#include "train/distill.h"
#include "train/state.h"
#include "train/ema.h"
#include "train/progress.h"
#include "train/picture.h"
#include "train/reference.h"
#include "train/fit.h"
#pragma GCC diagnostic pop
#undef TT__IMPLEMENT
#endif /* TT__IMPLEMENT */

/*
MIT License

Copyright (c) 2026 tinytrain contributors

Permission is hereby granted, free of charge, to any person obtaining a copy of this software and associated
documentation files (the "Software"), to deal in the Software without restriction, including without
limitation the rights to use, copy, modify, merge, publish, distribute, sublicense, and/or sell copies of the
Software, and to permit persons to whom the Software is furnished to do so, subject to the following
conditions:

The above copyright notice and this permission notice shall be included in all copies or substantial portions
of the Software.

THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT NOT LIMITED
TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL
THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF
CONTRACT, TORT OR OTHERWISE, ARISING FROM, OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER
DEALINGS IN THE SOFTWARE.
*/
