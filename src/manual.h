#pragma once

/* tinytrain.h - trains transformers from C                           MIT license, at the end of the file

   WHAT IT IS
     tinytrain.h is one header that trains transformer models on the CPU. Copy it into your project; it needs
     no other file and no library but libc, libm and pthreads. A model records its ops on a tape. tt_compile
     differentiates the tape, rewrites it in passes, and places every value in one arena: a training step is
     then a straight-line program, and its memory is known before anything is allocated.
     The words of this manual are explained at its end (GLOSSARY).

   DO THIS
     In exactly one C or C++ file, before other includes, write

         #define TINYTRAIN_IMPLEMENTATION
         #include "tinytrain.h"

     and link with -lm -lpthread. Give these two lines a file of their own: that file compiles once, in half a
     minute. A file that includes the header without the macro compiles in a tenth of a second. Six lines make
     the first training step of a linear classifier (docs/your-own-model.md has a whole program around similar
     lines; tests/check_readme.py builds and runs it):

         tt_tape *t = tt_tape_new(ctx);
         tt_value x = tt_input(t, "x", TT_F32, 64, 16), y = tt_input(t, "y", TT_I32, 64, 1);
         tt_value loss = tt_cross_entropy(t, tt_linear(t, x, w, b), y, NULL);
         tt_program *p = tt_compile(t, loss, NULL);
         tt_set(p, x, features, 64), tt_set(p, y, classes, 64);
         tt_step(p, 1e-3f, &stats);

   COMPILE-TIME OPTIONS, macros to define in the file with the implementation
     TINYTRAIN_FILENAME         Define it as the header's name if you renamed the header, because the header
                                includes itself. Default "tinytrain.h".
     TINYTRAIN_ALLOW_FAST_MATH  Define it if your build must use -ffast-math, which breaks NaN checks and
                                rounding and is otherwise refused.
     TINYTRAIN_NO_AVX512, TINYTRAIN_NO_AVX2
                                Define one for faster debug builds: it leaves out an instruction set. NO_AVX2
                                leaves out both.
     TINYTRAIN_CBLAS            Define it if a CBLAS of your CPU multiplies fp32 matrices faster; matrices of
                                few rows stay with tinytrain. The file includes <cblas.h>; link a CBLAS, for
                                example with -lopenblas. The CBLAS chooses its number of threads
                                (OPENBLAS_NUM_THREADS).
     TINYTRAIN_CUDA             Define it to run programs on device "cuda". Compile tinytrain_cuda.cu with
                                nvcc and link it, cublasLt and cudart.
     TINYTRAIN_MPI              Define it to train with the processes that mpirun starts. Compile with mpicc,
                                or with its flags, and an MPI 3 library. Without this macro tt_open refuses to
                                run under mpirun, unless TINYTRAIN_ALONE=1 in the environment says that each
                                process trains alone.
     NDEBUG                     Define it to turn off the verifier by default. The verifier checks the program
                                after each pass.
     A file that is a backend, such as tinytrain_cuda.cu, defines TINYTRAIN_BACKEND instead (src/backend/).
     The header needs gcc >= 9 or clang >= 11 (vector extensions), and POSIX (Linux, macOS), Windows or
     WebAssembly (WASI). For AVX, GCC for Windows needs -DTINYTRAIN_UNALIGNED_MOVES
     -Wa,-muse-unaligned-vector-move. Compile with optimisation (-O2). No -march flag is needed: the header
     chooses the instruction set, and how it multiplies bf16 matrices, at run time. TINYTRAIN_ISA and
     TINYTRAIN_BF16 in the environment force a choice (tt_context_options).
     Set TINYTRAIN_CUDA_SYNC=1 in the environment to find the op that fails on "cuda": the device then waits
     after each op, and errors name the op.
     On a device of compute capability 9.0 (compile tinytrain_cuda.cu for sm_90a), attention in 16 bits uses
     special kernels (wgmma) for heads of 33 to 64 columns, and in the forward for heads of 97 to 128 columns.
     TINYTRAIN_WGMMA=0 in the environment turns these kernels off.

   VENDORING
     One file      Copy tinytrain.h (and tinytrain_cuda.cu for GPUs). The file with the implementation
                   includes the header before any system header, because the header defines _GNU_SOURCE. With
                   -std=gnu99 or later, and in C++, the include may be anywhere.
     CMake 3.16    Use add_subdirectory or FetchContent with the repository, or find_package(tinytrain) after
                   an install. target_link_libraries(app PRIVATE tinytrain::tinytrain) then adds the header's
                   folder, libm and threads. The library tinytrain::cuda contains tinytrain_cuda.cu and
                   defines TINYTRAIN_CUDA for its users. It exists with -DTINYTRAIN_CUDA=ON, or after
                   set(TINYTRAIN_CUDA ON), and needs a CUDA compiler.
     pkg-config    Run `make install` or `cmake --install`, then pkg-config --cflags --libs tinytrain.
                   pkg-config --variable=cuda_source tinytrain prints the path of tinytrain_cuda.cu.
     Warnings      The header compiles without warnings under -Wall -Wextra -Wpedantic -Wconversion -Wshadow
                   (gcc and clang; C99, C11, C++17, C++20), and under -Wold-style-cast, which the
                   implementation turns off for itself because it is C.

   THREE LEVELS
     models    tt_bert_load or tt_vit_load loads a model, tt_loader_new or tt_image_loader_new makes batches,
               tt_trainer_new and tt_fit (or tt_train_batch and tt_evaluate) train, tt_predict predicts, and
               tt_bert_save or tt_vit_save writes the model. See examples/distilbert_imdb.c and
               examples/vit_l16.c. tt_lm_load, tt_lm_save, tt_generate and tt_generate_text are for decoders:
               see examples/gpt.c.
     tape      Build your own model with tt_param_new and a function that records ops; then tt_compile,
               tt_set, tt_step, tt_get; tt_program_save, tt_program_load. examples/hello.c builds a
               transformer in 90 lines. Wrap your function in a tt_model, and your data in a tt_source, and
               tt_fit trains the model.
     ops       Add an op with a row in TT__OPS (src/backend/ops.h), a block in src/ops/FAMILY/rules.h
               (recorder, shape rule, backward), kernels beside it (cpu.h, cuda.cuh), and a line in the table
               of test cases (tests/ops/cases.h).

   ROWS
     Activations are matrices (rows, width). The rows are the tokens of all sequences one after another,
     without padding. Attention and pooling read seq_start: the first row of each sequence, then the number of
     all rows. For 2 sequences of 5 and 3 tokens, tt_set gets the 3 rows 0, 5, 8. An axis of rows has a
     capacity when the tape is recorded, and an actual number of rows in each run (tt_axis).

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
     Two calls that record must not be arguments of one call: the compiler chooses their order, and random
     numbers depend on the order.

   ROWS THAT ARE READ
     A program computes only the rows that something reads. The compiler moves tt_gather_rows up through ops
     that work row by row and through the queries of attention. A classifier that reads [CLS] therefore skips
     most of its last layer. The result is the result over all rows up to rounding (in 16 bits, operands of a
     loss are not rounded).

   MEMORY
     tt_compile computes how much memory a program needs (tt_program_plan, tt_plan_text, tt_plan_svg). It
     allocates nothing, and works for a kind of device that this machine lacks. tt_allocate, or the first
     tt_set, allocates the arena, of exactly the planned size. A step allocates nothing, with two exceptions:
     a CBLAS may allocate, and with tt_compile_options.tune the first run takes memory of the device while it
     measures times.
     A program that shares another program's arena (evaluation) costs the larger of the two, not the sum. The
     arena is released with the last of its programs and parameters: in tt_close, if it holds parameters.
     recompute and offload (tt_compile_options) need less memory of the device, and in return more computation
     or more memory of the host, which the plan counts. On "cpu" the bits of the results stay the same; for
     "cuda" see DETERMINISM. Device "cpu" computes in the host's memory, so offload saves nothing there.

   DETERMINISM
     The same inputs, seed, options and instruction set give the same bits: for any number of threads, after a
     restart from a saved state, for any placement of values, and whatever the caller's floating-point mode
     (rounding, subnormals). Random numbers are functions of (seed, step, micro-batch, instruction, element).
     Results differ by rounding between devices, between instruction sets, and between the ways to multiply
     bf16 matrices (dot products, tiles, conversion to fp32). With TINYTRAIN_CBLAS the CBLAS decides what is
     deterministic.
     On "cuda" with one rank, the linear layers of one x, such as queries, keys and values, run as one matrix
     product, and cuBLASLt may sum one product in another order than three. The three products stay separate
       - with a memory_budget or `offload`;
       - if an output (tt_output) or a mark (tt_keep, tt_recompute, tt_offload) treats only some of them
         differently;
       - in managed memory, if they need more than the runtime fetches at once;
       - if an earlier program has stored some of the weights elsewhere.
     The bits may then differ, because the sums have another order. On "cuda" the bits also differ by
     rounding if recompute computes a GELU by tanh after a linear layer a second time.
     tt_compile_options.tune, on "cuda", chooses the fastest of several ways to compute a product. The ways
     add up in different orders, so their results differ by rounding of fp32 sums, and, depending on whether
     GELU or its slope is part of a product, by one rounding to 16 bits in between. Timing finds the fastest,
     and two ways that are about as fast may change places between runs: two runs from the start have the same
     bits only if they read the ways from the same file (tune names it). Therefore "off" is the default: the
     same inputs give the same bits unless the caller says otherwise. Within a run nothing changes: the ways
     are found once, before the first step, and are the same on all ranks. A state holds them, and a run that
     is resumed from the state has the bits of an uninterrupted run, on the same kind of GPU with the same
     cuBLASLt. The logger gets a warning if the GPU or cuBLASLt differs, or if only one of the two runs uses
     `tune`. A program that is compiled for an arena after the arena's first run measures no times.

   GRADIENTS
     A loss is a mean over its targets: the targets of all micro-batches of a step together. tt_step says what
     happens to a gradient or loss that is not finite. With f16 ("16-mixed", "16-true") the backward starts
     from a loss scale (tt_loss_scale) instead of 1, so that small gradients do not vanish. The update divides
     the scale out again: norms, tt_get_gradient and the optimizer see true gradients.

   THREADS
     A context has a pool of threads that sleep when idle. Use a context from one thread at a time; two
     contexts are independent. On the CPU each rank has its own threads, at least one: the context's threads
     are divided equally among the ranks. Ranks may call the allocator, one at a time, but not the logger.
     Several threads may use one tokenizer at once. A thread needs 256 KB of stack.

   ERRORS
     Functions return tt_status or NULL. tt_error(ctx) is one sentence that names the culprit and what to do.
     Nothing here exits, aborts or prints; the default logger writes warnings and errors to stderr.

   SEVERAL DEVICES
     The ranks of "cpu*4", "cuda*8" or "cuda:0,2" run one program, each on its part of the data and its shards
     of the tensors (tt_parallel); a rank is a thread. Give each data rank its micro-batch with tt_set_rank,
     unless a trainer does. With the same tt_parallel.groups, the bits of a training do not depend on the
     number of data ranks. zero 0 and 1 give the same bits. zero 2, 3 and reduce_micros give the same bits as
     one another, but other bits than zero 0 and 1 if a step has several micro-batches. Two GPUs load from
     each other's memory if a test at their opening finds that the bytes arrive right. Otherwise, and with
     TINYTRAIN_PEERS=0 in the environment, data go through the host's memory. When a rank fails, all ranks
     stop with one sentence. A state is one file of whole tensors, whatever the ranks: a run may resume on
     other ranks.
     tt_parallel.pipeline cuts a model into stages of consecutive blocks, each with its own parameters, plan
     and ranks (tt_stage_plan). The host keeps the inputs of a step's micro-batches; tt_update, tt_step and
     tt_run send them through the stages. The bits are the bits of one stage. tt_micro_step therefore only
     checks and keeps a micro-batch, and its tt_stats are zeros because nothing has run yet.

   SEVERAL MACHINES
     With TINYTRAIN_MPI, `mpirun -n 4 program` with device "cpu*2" has 8 ranks, two in each process: the bits
     are those of "cpu*8" in one process. Every process runs the whole program and calls the same functions in
     the same order. tt_set_rank accepts and ignores the data of other processes' ranks (the pointer may be
     NULL), but their numbers of rows must be right. Process 0 alone writes files, and each process reads what
     its ranks need: use paths that all processes see. tt_param_get and the functions that save a model
     collect shards, so all processes must call them.
     The first context starts MPI, which ends with the process. A caller who starts MPI calls MPI_Init_thread
     before, with MPI_THREAD_SERIALIZED or more. MPI_Init cannot be interrupted, so the context calls it on a
     separate thread: if a process does not arrive, tt_open fails after the timeout; the program then exits,
     and mpirun ends the job. Only the time limit of the whole job (mpirun --timeout SECONDS) bounds a
     caller's MPI_Init, and MPI_Finalize, which waits for the other processes when a process exits.
     Tensor ranks exchange data within every layer, so let a process have a multiple of the tensor ranks.
     tt_plan.sent_bytes is what a process sends in a step.
     The processes of a host divide its GPUs in order: with "cuda*2" the first process has cuda:0 and cuda:1,
     the second cuda:2 and cuda:3; with "cuda:0" each process uses cuda:0. Data that GPUs send go through the
     host's memory. If MPI reports that it is CUDA-aware, gathered shards, and what one rank sends to all or
     to another, go from GPU to GPU; TINYTRAIN_MPI_CUDA=0 or 1 in the environment overrides the report. Sums,
     and what a stage sends to the next, go through the host's memory with any MPI. The number of ranks of a
     pipeline's stage must divide the number of ranks of a process, or be a multiple of it.
     An error that all processes find at once, such as a wrong input, leaves them working. Three errors end
     the work of all processes for good: an error of one rank alone, a process that is gone, and a process
     that sends nothing for tt_context_options.timeout. Each later call then returns a sentence that names
     process, host and instruction: the instruction that waits, or the last instruction that sent a message.
     If a process is killed, mpirun ends the job first, with its own sentence about rank, host and signal.

   LIMITS
     "cuda" needs compute capability 8.0. Machines must be little-endian. Parameters have at most 4
     dimensions, activations 2; there are at most 2^31 rows and 64 ranks. Matrix products add up in fp32
     whatever the dtype of the matrices; dot products and tiles of bf16 treat subnormals as 0, and dot
     products on Arm round to odd.
     Linux must permit tiles (AMX). It refuses if a thread has an alternate signal stack that is too small to
     save the tiles; after it has permitted tiles, no thread can get such a small stack. Cross-entropy stores
     its logits whole if something else reads them, or on a CPU with 16-bit gradients.

   FILES
     This file is joined from src/ of tinytrain's repository; a line "==== src/FOLDER/FILE" marks the start of
     a file. Folders: api, backend, base, tape, cpu, ops, passes, plan, ranks, context, compile, run,
     reports, files, text, data, models, train. Each uses only the folders before it.

   GLOSSARY
     tape           the list of values and instructions that a model records
     value          a tensor of a tape: shape, dtype, storage. Its rows are fixed, or those of an axis
     axis           a named number of rows with a capacity; the actual number may differ in each run
     op             a kind of computation, such as "linear"; an instruction is one use of an op
     pass           a function that rewrites a tape inside tt_compile
     program        a compiled tape with its plan
     plan, arena    the place of each value; the one block of memory that holds the values
     step           forward, backward and update; an epoch is one sweep over the data
     target         what a loss compares a row with: a class, the next token, a number
     micro-batch    the data of one forward and backward; accumulation sums gradients over micro-batches
     block          the instructions between two tt_block_end marks, usually one layer
     mark           a wish about one value: tt_output, tt_block_end, tt_keep, tt_recompute, tt_offload
     recompute      compute an activation a second time in the backward instead of keeping it
     offload        keep a tensor in the host's memory and copy it to the device when it is used
     loss scale     a factor of the loss that keeps small f16 gradients above zero
     rank           one worker with one device. Data ranks divide the data, tensor ranks the layers
     shard          a rank's part of a divided tensor
     stage          consecutive blocks of a pipeline, which ranks of their own run
     process        an operating-system process of a run, which has one or more ranks
     device group   all devices of a program
     collective     an exchange over ranks: gather, sum, broadcast or scatter
     barrier        a point where ranks or threads wait for one another
     placement      where a value is stored; a host copy is a copy in the host's memory
     in flight      begun and not ended: a copy, a collective, a micro-batch in a pipeline
     naming         the scheme of tensor names in a file: transformers' or torchvision's
     state          a file from which a run resumes: parameters, optimizer state, step, seed */
