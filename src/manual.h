#pragma once

/* tinytrain.h - trains transformers from C                           MIT license, at the end of the file

   WHAT IT IS
     One header that trains transformer models on the CPU: copy it into your project, no other file and no
     library but libc, libm and pthreads. A training step is a straight-line program that is known before it
     runs: ops are recorded on a tape, differentiated, rewritten by passes, and placed in one arena whose size
     is known before anything is allocated.

   DO THIS
     In exactly one C or C++ file, before other includes:

         #define TINYTRAIN_IMPLEMENTATION
         #include "tinytrain.h"

     and link with -lm -lpthread. Let these two lines be a file of their own: it compiles once, in half a
     minute, and files that include the header without the macro in a tenth of a second. Six lines to a first
     training step of a linear classifier (docs/your-own-model.md has a whole program around such
     lines, which tests/check_readme.py builds and runs):

         tt_tape *t = tt_tape_new(ctx);
         tt_value x = tt_input(t, "x", TT_F32, 64, 16), y = tt_input(t, "y", TT_I32, 64, 1);
         tt_value loss = tt_cross_entropy(t, tt_linear(t, x, w, b), y, NULL);
         tt_program *p = tt_compile(t, loss, NULL);
         tt_set(p, x, features, 64), tt_set(p, y, classes, 64);
         tt_step(p, 1e-3f, &stats);

   COMPILE-TIME OPTIONS, to be defined in the file with the implementation
     TINYTRAIN_FILENAME         the header's name, if you renamed it, for it includes itself ("tinytrain.h")
     TINYTRAIN_ALLOW_FAST_MATH  does not refuse -ffast-math, which breaks NaN checks and rounding
     TINYTRAIN_NO_AVX512, TINYTRAIN_NO_AVX2
                                leaves these instruction sets out (NO_AVX2: both), for faster debug builds
     TINYTRAIN_CBLAS            a CBLAS (<cblas.h>; link one, for example -lopenblas) multiplies matrices of
                                fp32, except those of few rows. Its threads are its own (OPENBLAS_NUM_THREADS)
     TINYTRAIN_CUDA             device "cuda" runs: compile tinytrain_cuda.cu with nvcc and link it, cublasLt
                                and cudart
     TINYTRAIN_MPI              processes that mpirun starts train together: compile with mpicc, or as it
                                does, with an MPI 3 library. Without it tt_open refuses such processes, unless
                                TINYTRAIN_ALONE=1 in the environment says that each is to train alone
     NDEBUG                     the verifier, which checks the program after each pass, is off by default
     A file that is a backend, as tinytrain_cuda.cu, defines TINYTRAIN_BACKEND instead (src/backend/).
     Needs gcc >= 9 or clang >= 11 (vector extensions) and POSIX (Linux, macOS). Compile with optimisation
     (-O2). No -march flag is needed: the instruction set is chosen at run time, and so is how bf16 matrices
     are multiplied. TINYTRAIN_ISA and TINYTRAIN_BF16 in the environment force one (tt_context_options).
     With TINYTRAIN_CUDA_SYNC=1 in the environment "cuda" waits after each op and errors name the op. On a
     device of compute capability 9.0 (compile tinytrain_cuda.cu for sm_90a) attention with heads of 33 to 64
     in 16 bits, and its forward with heads of 97 to 128, takes kernels of its own (wgmma);
     TINYTRAIN_WGMMA=0 in the environment turns them off.

   VENDORING
     One file      copy tinytrain.h (and tinytrain_cuda.cu for GPUs). The file with the implementation
                   includes it before any system header, as it defines _GNU_SOURCE; with -std=gnu99 or later,
                   or in C++, the place is free.
     CMake 3.16    add_subdirectory or FetchContent of the repository, or find_package(tinytrain) after an
                   install: target_link_libraries(app PRIVATE tinytrain::tinytrain) brings the folder of the
                   header, libm and threads. tinytrain::cuda is a library of tinytrain_cuda.cu that brings
                   TINYTRAIN_CUDA too; it is there with -DTINYTRAIN_CUDA=ON, or set(TINYTRAIN_CUDA ON) before,
                   and needs a CUDA compiler.
     pkg-config    `make install` or `cmake --install`; pkg-config --cflags --libs tinytrain. The path of
                   tinytrain_cuda.cu is pkg-config --variable=cuda_source tinytrain.
     Warnings      The header has none under -Wall -Wextra -Wpedantic -Wconversion -Wshadow (gcc and clang;
                   C99, C11, C++17, C++20), nor under -Wold-style-cast, which the implementation turns off
                   for itself: it is C.

   THREE LEVELS
     models    tt_bert_load or tt_vit_load, tt_loader_new or tt_image_loader_new, tt_trainer_new, tt_fit (or
               tt_train_batch and tt_evaluate), tt_predict, tt_bert_save or tt_vit_save. See
               examples/distilbert_imdb.c and examples/vit_l16.c. tt_lm_load, tt_lm_save, tt_generate,
               tt_generate_text: decoders, see examples/gpt.c.
     tape      your own model: tt_param_new, a function that records ops; tt_compile, tt_set, tt_step, tt_get;
               tt_program_save, tt_program_load. examples/hello.c is a transformer of one's own in 90 lines.
               As a tt_model with a tt_source of data, tt_fit trains it.
     ops       a row in TT__OPS (src/backend/ops.h), a block in src/ops/FAMILY/rules.h (recorder, shape rule,
               backward), kernels beside it (cpu.h, cuda.cuh), and a line in the table of test cases
               (tests/ops/cases.h).

   ROWS
     Activations are (rows, width); rows are the tokens of all sequences one after another, without padding.
     Attention and pooling read seq_start, the first row of each sequence, and behind these the number of
     rows: of 2 sequences with 5 and 3 tokens tt_set takes 3 rows, 0, 5, 8. Rows have a capacity when recorded
     and a number in each run (tt_axis).

   A TRANSFORMER BLOCK, pre-norm: x (rows, D), starts of tt_seq_start; parameters of a struct of yours
         tt_attention_options a = tt_attention_options_default(heads);
         tt_value h = tt_layernorm(t, x, m->norm1_w, m->norm1_b, 1e-5f);
         tt_value q = tt_linear(t, h, m->q_w, m->q_b);
         tt_value k = tt_linear(t, h, m->k_w, m->k_b);
         tt_value v = tt_linear(t, h, m->v_w, m->v_b);
         h = tt_linear(t, tt_attention(t, q, k, v, starts, &a), m->out_w, m->out_b);
         x = tt_add(t, x, tt_dropout(t, h, 0.1f));
         h = tt_layernorm(t, x, m->norm2_w, m->norm2_b, 1e-5f);
         h = tt_linear(t, tt_gelu(t, tt_linear(t, h, m->up_w, m->up_b)), m->down_w, m->down_b);
         x = tt_add(t, x, tt_dropout(t, h, 0.1f));
         tt_block_end(t, x);
     Calls that record must not be arguments of one call beside each other: a compiler chooses their order, on
     which random numbers depend.

   ROWS THAT ARE READ
     What is read of some rows only is computed for these only: tt_gather_rows moves up through ops that work
     row by row and through the queries of attention. So a classifier that reads [CLS] skips most of its last
     layer. It gets what all rows would give, up to rounding (in 16 bits, operands of a loss are not rounded).

   MEMORY
     tt_compile says how much a program needs (tt_program_plan, tt_plan_text, tt_plan_svg) and allocates
     nothing, even for a kind of device that is not there. tt_allocate, or the first tt_set, allocates the
     arena, exactly that large; a step allocates nothing (but a CBLAS may, and with `tune` the first run takes
     memory of the device for as long as it times). A program that shares another's
     arena (evaluation) costs the larger of the two, not the sum. The arena is released with the last of its
     programs and parameters: by tt_close, when parameters live there.
     recompute and offload (tt_compile_options) need less of the device for more work, or for memory of the
     host, which the plan counts too; the bits stay the same. Device "cpu" computes in the host's memory, so
     that offload saves nothing there.

   DETERMINISM
     The same inputs, seed, options and instruction set give the same bits, for any number of threads, after a
     restart from a saved state, for any placement, and whatever the caller's floating-point mode (rounding,
     subnormals). Random numbers are functions of (seed, step, micro-batch, instruction, element). Different
     devices and instruction sets, and dot products or tiles of bf16 against conversion, differ by rounding.
     With TINYTRAIN_CBLAS all of this is as the library has it. On "cuda" with one rank, products of one x,
     such as those that make queries, keys and values, are one product, and cuBLASLt may sum one in another
     order than three. They are three with a memory_budget or `offload`, where an output (tt_output) or a mark
     (tt_keep, tt_recompute, tt_offload) treats only some of them in a way of its own, in managed memory where
     they need more than it brings at once, and where a program that was compiled before has put some of the
     weights elsewhere: then the bits may differ by that.
     tt_compile_options.tune, on "cuda", takes the fastest of several ways to make a product, which add up in
     different orders. Which is the fastest is found by timing, and two that are about as fast may change
     places from one run to the next: two runs from the start have the same bits only if they take the ways
     from the same file (tune names it). As the same inputs are to give the same bits unless the caller says
     otherwise, "off" is the default. Within a run nothing changes: ways are found once, before the first
     step, all ranks have the same, they are saved with the state, and a run that goes on from it has the bits
     of one that was never stopped, on the same kind of GPU with the same cuBLASLt. The logger is warned where
     these differ, and where one of the two runs is without `tune`. Programs that are compiled for the arena
     after its first run time nothing. The ways differ by rounding in fp32 sums, and, where GELU or its slope
     is part of a product or not, by a rounding to 16 bits in between.

   GRADIENTS
     A loss is a mean over its targets: those of all micro-batches of a step together. tt_step says what
     becomes of a gradient or loss that is not finite. With f16 ("16-mixed", "16-true") the backward starts
     from a loss scale (tt_loss_scale) instead of 1, so that small gradients do not vanish, and the update
     divides it out again: norms, tt_get_gradient and the optimizer see true gradients.

   THREADS
     A context has a pool of threads that sleep when idle. Use a context from one thread at a time; contexts
     do not know of each other. Ranks on the CPU have equally many of its threads each, and at least one, as
     threads of their own; ranks may call the allocator, one at a time, but not the logger. A tokenizer may be
     used by several threads at once. Threads need 256 KB of stack.

   ERRORS
     Functions return tt_status or NULL; tt_error(ctx) is one sentence that names the culprit and what to do.
     Nothing here exits, aborts or prints; the default logger writes warnings and errors to stderr.

   SEVERAL DEVICES
     The ranks of "cpu*4", "cuda*8" or "cuda:0,2" run one program, each on its part of the data and of the
     tensors, as tt_parallel says; a rank is a thread. Give each data rank its micro-batch with tt_set_rank; a
     trainer does so. With the same tt_parallel.groups the bits of a training do not depend on how many data
     ranks there are, nor on zero (0 and 1 are alike, and so are 2, 3 and reduce_micros). GPUs load from each
     other's memory where that brings the right bytes, which is tried when they are opened; else, and with
     TINYTRAIN_PEERS=0 in the environment, data go through the host's memory. When a rank fails, all stop
     with one sentence. A state is one file of whole tensors, whatever the ranks: a run goes on on others.
     tt_parallel.pipeline cuts a model into stages of consecutive blocks, each with its own parameters, plan
     and ranks (tt_stage_plan). The inputs of a step's micro-batches wait on the host; tt_update, tt_step and
     tt_run send them through the stages, with the bits of one stage. So tt_micro_step only checks and takes a
     micro-batch, and its tt_stats cover those that have run: none.

   SEVERAL MACHINES
     With TINYTRAIN_MPI, `mpirun -n 4 program` with device "cpu*2" is 8 ranks, of which each process has two:
     the bits are those of "cpu*8" in one. Every process runs the whole program, and calls the same functions
     in the same order; tt_set_rank takes (and ignores, it may be NULL) the data of ranks of others, whose
     rows must be right. Process 0 alone writes files, and each reads what its ranks need: name files by paths
     that all see. tt_param_get and what saves a model collect pieces, so all processes call them. The first
     context starts MPI, which ends with the process; a caller who starts it calls MPI_Init_thread before, and
     asks for MPI_THREAD_SERIALIZED or more. MPI_Init cannot be interrupted, so the context calls it on a
     thread of its own: tt_open fails after the timeout where a process does not come, and the program, which
     then exits, makes mpirun end the job. MPI_Init of a caller and MPI_Finalize, which waits for the others
     when a process exits, have no bound but that of the whole job: mpirun --timeout SECONDS.
     As tensor ranks talk within every layer, let the ranks of a process be a multiple of them.
     tt_plan.sent_bytes says what a process sends in a step.
     The processes of a host take its GPUs in turn: with "cuda*2" the first has cuda:0 and cuda:1, the second
     cuda:2 and cuda:3; with "cuda:0" each has that one. What GPUs send goes through the host's memory. Where
     MPI says of itself that it is CUDA-aware, pieces that ranks gather, and what one sends all or another,
     goes from GPU to GPU instead; TINYTRAIN_MPI_CUDA=0 or 1 in the environment says it in its place. Sums,
     and what stages pass on, go through the host's memory with any MPI. The ranks of a pipeline's stage
     divide those of a process, or are a multiple of them.
     An error that all meet at once, as a wrong input, leaves the processes at work. One that a rank meets
     alone, a process that is gone, or one that is not heard of for tt_context_options.timeout, ends the work
     of all for good: each call then returns the sentence that names process, host and instruction: the one
     that waits, or the last of which a message came. mpirun ends the job of a process that was killed, with
     its own sentence on rank, host and signal, before that.

   LIMITS
     "cuda" needs compute capability 8.0. Little-endian machines. At most 4 dimensions for parameters, 2 for
     activations; 2^31 rows; 64 ranks. Products of matrices add up in fp32 whatever the dtype of these; dot
     products and tiles of bf16 take subnormals as 0, dot products on Arm round to odd.
     Tiles (AMX) are used where Linux lets the process have them: it refuses if a thread has an alternate
     signal stack too small to save them, and afterwards takes no such stack. Cross-entropy of logits that
     something else reads too, or on a CPU with 16-bit gradients, holds the logits whole.

   FILES
     This file is joined from src/ of tinytrain's repository; a line "==== src/FOLDER/FILE" is where a file
     begins. Folders: api, backend, base, tape, cpu, ops, passes, plan, ranks, context, compile, run,
     reports, files, text, data, models, train. Each uses only those before it. */
