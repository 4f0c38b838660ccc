#pragma once
#include "standard.h"
#include "context.h"
#include "params.h"
#include "tape.h"

/* --------------------------------------------------------------------------------------------- optimizers */

/* X(kind, name, op, decoupled, state, word, second state, its word). `op` computes the update. `decoupled`:
   weight decay bypasses the gradient. A state is what the op keeps of each parameter (NULL: nothing); in
   saved states its word, which is PyTorch's, stands before the parameter's name. */
#define TT__OPTIMIZERS(X) \
    X(TT_SGD, "sgd", SGD, false, "momentum", "momentum_buffer", NULL, NULL) \
    X(TT_ADAM, "adam", ADAM, false, "m", "exp_avg", "v", "exp_avg_sq") \
    X(TT_ADAMW, "adamw", ADAM, true, "m", "exp_avg", "v", "exp_avg_sq")
#define TT__KIND(kind, name, op, decoupled, state, word, second, its_word) kind,
typedef enum tt_optimizer_kind { TT__OPTIMIZERS(TT__KIND) } tt_optimizer_kind;
#undef TT__KIND

typedef struct tt_optimizer_options {
    tt_optimizer_kind kind;         /* default TT_ADAMW (Loshchilov, Hutter 2019) */
    float momentum;                 /* SGD; default 0 */
    bool nesterov;                  /* SGD; default false */
    float beta1, beta2, eps;        /* Adam(W); default 0.9, 0.999, 1e-8 */
    float weight_decay;             /* default 0.01. SGD, ADAM: added to the gradient; ADAMW: decoupled */
    const char *const *no_decay;    /* NULL-terminated name patterns without decay; default: 1-D parameters
                                       (biases, norms). An empty list decays all */
    float clip_norm;                /* largest global norm of the gradient; 0: no clipping. Default 0 */
} tt_optimizer_options;
tt_optimizer_options tt_optimizer_options_default(void);

typedef enum tt_schedule_kind { TT_CONSTANT, TT_LINEAR, TT_COSINE } tt_schedule_kind;

typedef struct tt_schedule {
    tt_schedule_kind kind;
    float lr, min_lr;      /* after the warm-up lr stays, or falls to min_lr, linearly or along a cosine */
    int64_t warmup_steps;  /* step s < warmup_steps uses lr * s / warmup_steps (as transformers does) */
    int64_t total_steps;   /* of warm-up and decay together */
} tt_schedule;
float tt_schedule_lr(const tt_schedule *s, int64_t step); /* step counts from 0 */

/* Dynamic loss scaling (Micikevicius et al., "Mixed precision training", 2018), with PyTorch's names and
   defaults (GradScaler). All three numbers are powers of two, so that scaling is exact. */
typedef struct tt_loss_scale {
    float init;    /* what the backward of the first step starts from. 1..2^40, default 65536 */
    float growth;  /* its factor after `interval` steps without overflow, up to 2^40. >= 1, default 2 */
    float backoff; /* its factor after an overflow, below 1. Default 0.5. A scale below 1 is an error */
    int interval;  /* >= 1, default 2000 */
} tt_loss_scale;
tt_loss_scale tt_loss_scale_default(void);

/* ----------------------------------------------------------------------------------------------- programs */

/* How a program is spread over the ranks of its device: "cpu*4" has four. A rank runs the whole program on
   its part of the data and of the tensors. Ranks are numbered tensor ranks first: rank = (stage * data + data
   rank) * tensor + tensor rank. */
typedef struct tt_parallel {
    /* Ranks along each axis. Default tensor 1, data 0: the device's ranks / tensor. With several data ranks a
       program that trains has one loss: they divide by its targets on all of them. Tensor ranks split linear
       layers that follow each other with what stands between them, attention by heads where their number
       divides, if those together have 1,000,000 weights, and large embeddings; all else each does whole.
       tt_plan.split_params says how much is split. A layer that a program has whole, as its hidden values are
       an output, stays whole in later programs with its parameters. */
    int data, tensor;
    /* What is split over the data ranks (Rajbhandari et al., "ZeRO", 2020): 0: nothing; 1 (default): the
       optimizer's state; 2: also gradients, summed after each micro-batch; 3: also parameters. Tensors of
       fewer than 65,536 elements stay whole. TT_ZERO_BUDGET: of 1 to 3 what fits memory_budget in the fewest
       seconds (tt_compile_options.offload). Where steps have several micro-batches, 2 and 3 give other bits
       than 1, but for reduce_micros. */
    int zero;
    bool server;        /* data rank 0 alone has optimizer state and updates. With zero 0 or 1 */
    /* tensor > 1: between split layers rows of activations are split (Korthikanti et al., "Reducing
       activation recomputation in large transformer models", 2022). Default false. */
    bool sequence;
    /* Leaves of the tree that sums gradients: the bits of a training depend on it, and not on how many data
       ranks there are. A multiple of these; where it is more, they are a power of two. Micro-batch m of a
       step belongs to leaf m % groups. 0 (default): data. */
    int groups;
    /* Sum the gradients of the ranks after each micro-batch, for the bits of zero 2 and 3, which do so
       anyway; else once a step. Default false. */
    bool reduce_micros;
    /* Stages: the program is cut at tt_block_end marks, where one value alone goes on, into so many parts of
       about equal FLOPs, each of which other ranks run. Default 1; 0: 1. The micro-batches of a step follow
       each other through the stages. "1f1b" (default, and NULL): a stage begins the backward of a micro-batch
       as soon as it can, so that stage s holds at most pipeline - s of them (Narayanan et al., "PipeDream",
       2019, as flushed at each step's end). "gpipe": after all forwards, so that all stages hold all of a
       step's (Huang et al., "GPipe", 2019). The bits are those of one stage; but of a parameter that two
       stages use, they differ by rounding. Not with zero 2, 3 and TT_ZERO_BUDGET, server,
       reduce_micros and update "backward". */
    int pipeline;
    const char *schedule;
    /* Most micro-batches of a step on a data rank. "gpipe" needs it, and a pipeline refuses more. What says
       "budget" is chosen for the seconds of a step with so many. Default 0: any, and choices are made for a
       step with one. */
    int micros;
} tt_parallel;
#define TT_ZERO_BUDGET (-1)
tt_parallel tt_parallel_default(void);

/* What a rank and its links do a second, and what it takes to start work. They change what is planned, never
   bits. All are finite, the seconds at least 0, the others above 0. */
typedef struct tt_costs {
    double product_16, product_f32;     /* FLOP/s of matrix products, of 16-bit and of fp32 operands */
    double attention_16, attention_f32; /* ... of attention and its backward */
    double rows_16, rows_f32;           /* bytes a second that norms, sums, losses and so on read and write */
    double update_16, update_f32;       /* ... that the optimizer does, of parameters in 16 bits and fp32 */
    double update_host;                 /* ... that it does in the host's memory: update "host" */
    double memory;                      /* ... that no op exceeds */
    double to_host, from_host, between_ranks; /* bytes a second of links */
    double launch, meeting;             /* seconds: of an op, and of ranks before they move anything */
} tt_costs;
/* Of no device in particular, an A100 or H100 behind PCIe 4: 300 TFLOP/s in 16 bits and 60 in fp32, 2 TB/s of
   memory, links of 25 GB/s to the host and 50 GB/s between ranks, 50 GB/s of updates in the host's memory;
   3 us to start an op, 25 us for ranks to meet. */
tt_costs tt_costs_default(void);
/* Measures those of a device, as tt_compile_options.device names it, in about a second: a block of a
   transformer trains there on all ranks (an optimizer's step with all gradients moves what zero 1 moves).
   What needs several ranks stays tt_costs_default's on one. Others that use the device meanwhile make it look
   slower. After an error *costs is as it was. */
tt_status tt_measure_costs(tt_context *ctx, const char *device, tt_costs *costs);

typedef struct tt_compile_options {
    bool train; /* default true: backward and update; false: forward only, dropout off */
    /* "32-true" (default); "bf16-mixed" (bf16 activations and matmuls; fp32 weights, their gradients and
       optimizer state); "bf16-true" (bf16 weights, gradients and optimizer state, stochastic rounding);
       "16-mixed", "16-true": the same with f16 and loss scaling, but the optimizer state of "16-true" is
       bf16, with stochastic rounding, because Adam's v is often less than f16 can hold. */
    const char *precision;
    /* Dtype of residual sums, of what flows into the first of them, and of their gradients, in mixed
       precisions: "f32" (as PyTorch's autocast) or "16-bit". NULL (default): "f32" with "16-mixed", whose
       range such sums could leave, else "16-bit", as results of norms, activations and attention always. */
    const char *residual;
    /* What device "cuda" may round operands of matrix products to; sums are fp32, but of fp8. "fp32"
       (default): nothing less. "tf32": 10 bits of mantissa, of fp32 matrices (as PyTorch's
       set_float32_matmul_precision("high")), except in attention; other devices take it as "fp32". "fp8":
       E4M3, gradients E5M2 (Micikevicius et al.: "FP8 formats for deep learning", 2022), in linear layers
       with 16-bit operands, widths that are multiples of 16, and a size that pays (4,096 rows and widths of
       1,024 do, 6,144 and 768 do not); needs "cuda" of compute capability 8.9. A tensor is rounded once for
       all products that read it, and what the backward reads of it alone is kept in fp8. It is scaled by a
       power of two: the largest with which twice the largest magnitude of the 16 steps before is in range
       (delayed scaling, as NVIDIA's Transformer Engine), saved with a run's state. What is larger saturates,
       and what is not finite becomes NaN. In a first step, without training, and on tensor ranks the largest
       magnitude of the tensor itself decides. Hopper's tensor cores add products of fp8 in 14 bits
       (DeepSeek-V3, arXiv 2412.19437, section 3.3.2); of gradients cuBLASLt moves such sums to fp32 every few
       products, of results, for speed, only at the end, as Transformer Engine has it. */
    const char *matmul;
    tt_loss_scale loss_scale; /* read with "16-mixed" and "16-true" only */
    /* What the backward computes again instead of keeping it, for the same bits (on "cuda", those of a
       tanh-GELU after a linear layer differ by rounding: cuBLASLt computes it in the product). "none";
       "cheap" (default): results of layer norm, GELU and SiLU, and 16-bit copies of weights, at no matrix
       products, and what ranks gathered for parallel.sequence; "attention": its results too; "blocks":
       whatever the backward reads of the blocks that tt_block_end marks, except the last, with which the
       backward begins (Chen et al., "Training deep nets with sublinear memory cost", 2016). "budget": of what
       the backward reads, what costs least so that the plan fits memory_budget, which must be set; ends of
       blocks are kept. The least is FLOPs where nothing is offloaded, nor parameters divided (parallel.zero
       3), and else seconds by `costs`. */
    const char *recompute;
    /* What lies in the host's memory and is copied to the device only while it is used there, for the same
       bits: a list with commas of "optimizer" (its state), "gradients" (from the end of the backward, or of
       a micro-batch, to the update), "parameters" and "activations" (what the backward reads of the blocks
       that tt_block_end marks, except the last). What belongs to a parameter of fewer than 65,536 elements,
       and activations that are smaller, stay on the device. NULL (default) or "none": nothing. Programs that
       have parameters in common agree on "parameters". On "cpu" it only adds copies, for trying it out.
       "budget": what makes the plan fit memory_budget in the fewest seconds, by `costs`; of activations,
       those of the first blocks, as many as it takes; on "cpu" nothing. On "cuda" products of one x are not
       one then (see DETERMINISM), so that the bits may differ. */
    const char *offload;
    /* What the arena is made of, on device "cuda" with one rank; the bits are the same. "device" (default,
       and NULL): the GPU's own memory. "managed": CUDA's unified memory; tt_allocate refuses an arena of more
       bytes than the GPU has free, with TT_ERR_MEMORY. "managed-oversubscribed": it may be larger. The
       resident workspace, and parameters, gradients and optimizer state in the order of their use in half of
       what is then free, are to stay on the GPU. All else comes to it before the instructions that need it,
       at most two windows of instructions ahead (a window needs at most a quarter of the rest), and leaves it
       as CUDA decides. Such a step takes as long as these copies do, and no graph is made of it; prefer
       `offload`, which is planned. Needs a GPU with concurrentManagedAccess (Linux, but not WSL). */
    const char *memory;
    /* On device "cuda": how products of matrices are made. "off" (default, and NULL): by the algorithm that
       cuBLASLt's heuristic offers first. "on": the first run times, once for each kind of product of all
       programs of the arena at full capacity, the algorithms that cuBLASLt offers, and what can be one with
       the product (GELU and its slope, sums of columns) against kernels of the library. It takes memory of
       the device beside the plan and gives it back; where there is not enough, such a product is as with
       "off", and the logger is warned. Where a run has fewer rows, rounded up to a multiple of 128, a product
       takes over which kernels are the fastest, and not the algorithm. What is chosen is saved with a run's
       state, and a run that is resumed chooses nothing anew. Other words name a file: as "on", but what the
       file has is not timed, and what was timed is added to it; a file of another kind of GPU, or of another
       cuBLASLt, is refused, as is one that is damaged. See DETERMINISM. */
    const char *tune;
    bool accumulate; /* steps of several micro-batches: gradients persist between them. Default false */
    /* When parameters are updated. "end" (default): all at the end of the step. "backward": each as soon as
       its gradient is final, whose memory is then free, for the same bits (as Lv et al., "Full parameter
       fine-tuning for large language models with limited resources", 2023). It saves what gradients need
       beyond the activations that the backward has freed by then: most with small batches. Not with
       accumulate, clip_norm, loss scaling or parallel.server, which need all gradients at once. "host": at
       the end of the step, by the host's processor in the host's memory (Ren et al., "ZeRO-Offload", 2021),
       where the optimizer's state stays. Parameters and their gradients are copied there in groups, and
       parameters back, beside the updates of other groups, at most two groups ahead. What belongs to a
       parameter of fewer than 65,536 elements is updated on the device. The bits are those of updates on
       device "cpu", so that on "cuda" they are not those of "end". Nothing else chooses it. */
    const char *update;
    tt_optimizer_options optimizer;
    /* Bytes of the arena, on "cpu" with what `offload` keeps beside it, which a program that shares it later
       may not exceed either: TT_ERR_BUDGET from the tt_compile that would need more, and tt_error says what
       each option would save, the smallest possible with which options, and what "bf16-true" would need; of a
       pipeline, of the stage that needs most. 0 (default): no limit. Only
       what says "budget" (recompute, offload, parallel.zero) changes to fit; tt_plan says into what. Whatever
       the options say, copies run less far ahead, and what updates move together (up to 32 MiB) is less, down
       to one parameter at a time, where that makes it fit. */
    size_t memory_budget;
    /* What tt_plan's seconds, what runs beside computation, and choices by "budget" go by; copied. NULL
       (default): tt_costs_default(). */
    const tt_costs *costs;
    /* "cpu", "cuda", or by number, "cuda:1"; NULL (default): what TINYTRAIN_DEVICE in the environment says,
       else "cpu". Several ranks: "cpu*4" (threads of the context shared out), "cuda*8", "cuda:0,2", and
       "cuda:0,0", two ranks on one GPU. A program for a kind that this build cannot run is there to be
       planned: its plan counts the parameters whole, but it takes no part of their memory, and tt_allocate,
       tt_set and runs fail with TT_ERR_UNSUPPORTED (or TT_ERR_DEVICE, where the device is not there or
       failed). */
    const char *device;
    tt_parallel parallel; /* how the ranks of the device share the work. Default: tt_parallel_default() */
    /* A program of the same device whose arena to use; inputs are overwritten when the other runs. An arena
       that is allocated does not grow: compile the program that needs most before. NULL (default): none. */
    const tt_program *share;
} tt_compile_options;
tt_compile_options tt_compile_options_default(void);
/* Checks options as tt_compile does before it reads the tape: one message tells all names that are unknown
   and all options that do not go together. Sets the fields of o->parallel that are 0 to what they stand for
   on o->device. After an error *o is as it was. */
tt_status tt_check_options(tt_context *ctx, tt_compile_options *o);

/* Differentiates, rewrites and places; allocates no tensor. root: the loss (1, 1) to train on, or any value
   when train is false. The tape is copied and stays as it is, so it can be compiled again with other options;
   its value handles are valid in every program. NULL options: defaults. NULL on error. */
tt_program *tt_compile(tt_tape *t, tt_value root, const tt_compile_options *o);
void tt_program_free(tt_program *p);

/* Returns the largest number of rows, sequences or whatever `record` counts, up to `most`, of which a program
   fits o->memory_budget: one of so many did, and one of one more did not, if it is below `most`. (With
   "budget" among the options a still larger one might fit again.) record(user, t, n) records a micro-batch of
   n on a new tape, with parameters that are there already, and returns the root. Only plans are made, about
   ten: nothing is allocated, and it works for a kind of device that is not there. memory_budget 0: what is
   free on a GPU, of several the least, less 256 MiB (or an eighth) for what CUDA takes itself; on the CPU
   refused. Returns 0 after an error, which is the plan's if not even one fits. A trainer has
   tt_largest_micro_batch. */
int64_t tt_largest_batch(tt_context *ctx, tt_value (*record)(void *user, tt_tape *t, int64_t n), void *user,
                         const tt_compile_options *o, int64_t most);

typedef enum tt_category {
    TT_MEM_PARAMETERS, TT_MEM_GRADIENTS, TT_MEM_OPTIMIZER, TT_MEM_ACTIVATIONS, TT_MEM_WORKSPACE,
    TT_MEM_INPUTS, TT_MEM_CATEGORIES
} tt_category;
const char *tt_category_name(tt_category c);

typedef struct tt_plan {
    const char *device;                /* the kind that it is for: "cpu", "cuda" */
    int ranks, data, tensor, pipeline; /* all of them, and along each axis (tt_parallel) */
    int64_t params, split_params;      /* numbers in the program's parameters; of these, in parameters of
                                          which each tensor rank has a part */
    size_t bytes;                      /* the arena: exactly this much is allocated. Parameters that an
                                          earlier program's arena holds are in that one's plan only.
                                          These and the other bytes are those of rank 0, which has most */
    size_t bytes_least;                /* ... of the rank that has least: less where rank 0 is a server */
    /* Bytes that a rank loads from other ranks' memory in a step of one full micro-batch on each data rank,
       the most of any; and of these the least that any way to do the same needs. A sum over n ranks is at
       least 2 (n - 1) / n of its bytes; the half of that if each needs a piece only, which is also what it
       takes to gather them. A server alone sums, so it loads the gradients of all others, and each of these
       all parameters. Bookkeeping (norms, losses) is not among the least. */
    size_t moved_bytes, moved_least_bytes;
    /* Of several processes: bytes that all ranks of this one together send to others in such a step, and the
       least that any way to do the same needs. 0 of one process. */
    size_t sent_bytes, sent_least_bytes;
    size_t persistent_bytes;           /* parameters, optimizer state, kept gradients, resident workspace */
    /* Of the host's memory: settings and results of runs, and what tt_compile_options.offload keeps there, of
       which programs that share an arena have the parameters in common. Where the device has memory of its
       own, also each input twice, on its way there, and a buffer of 64 KiB, which such programs have in
       common; of several ranks each also 4 MiB that all programs have in common. Of several processes each
       rank has 8 MiB for messages, on any device. Of a pipeline also the inputs of parallel.micros micro-
       batches of a data rank (of one, where that is 0; more are allocated when they come), and where devices
       have memory of their own, what a stage passes on to another process of each micro-batch on its way. */
    size_t host_bytes;
    /* Bytes that a rank copies between the two memories because of `offload`, in a step of one full micro-
       batch on each data rank, and for each further one. */
    size_t transfer_bytes, transfer_micro_bytes;
    /* In use while parameters are initialised or loaded: they, the resident workspace and the buffer that
       they stream through. Nothing else of the arena is touched before the first step. */
    size_t init_bytes;
    /* Seconds of a step with one full micro-batch on each data rank, by tt_compile_options.costs: of
       computation, and what that waits for links. Without `costs`, of no GPU in particular. host_seconds is
       the part of the computation that the host's processor does (update "host") while the device waits. */
    double compute_seconds, exposed_seconds, host_seconds;
    double micro_compute_seconds, micro_exposed_seconds; /* of these, what each further micro-batch adds */
    size_t lower_bound_bytes;          /* live at one instruction, at most: no placement needs less */
    size_t at_peak[TT_MEM_CATEGORIES]; /* bytes live at the peak instruction, by category */
    int peak_instruction;              /* its number ... */
    char peak_name[96];                /* ... and what it is: "attention_backward layer.3" */
    int instructions, values;
    double flops;                      /* of matmuls and attention in one run at full capacity */
    double extra_flops;                /* of these, what is computed again */
    /* How the options were taken, and what those that say "budget" have come to. */
    const char *recompute;             /* as the option, which never is "budget" here ... */
    int recomputed;                    /* ... values that are computed again in a micro-batch ... */
    size_t recomputed_bytes;           /* ... and bytes of them */
    const char *offload;               /* as the option; "none" if nothing is moved */
    int offload_blocks;                /* with "activations": of so many blocks, the first */
    int zero;                          /* tt_parallel.zero */
    int ahead;                         /* blocks that copies and collectives run ahead, at most */
} tt_plan;
/* Works before anything is allocated. Of a pipeline, as all reports: that of the stage that needs most bytes,
   for one micro-batch; but `params`, `flops` and `extra_flops` are of all stages. */
tt_plan tt_program_plan(const tt_program *p);
tt_plan tt_stage_plan(const tt_program *p, int stage); /* of one stage, 0 to tt_plan.pipeline - 1 */

/* A storage. Values that view it, or work in place on it, share it. */
typedef struct tt_plan_value {
    const char *name; /* of the value that it holds at the peak, or of the op whose workspace it is */
    tt_category category;
    size_t bytes;
    int first, last;  /* the instructions from which to which it is occupied */
} tt_plan_value;
/* What lives at the peak instruction, largest first: at most `capacity` into `to`. Returns how many there
   are, 0 when out of memory; their bytes add up to tt_plan.at_peak. Names live as long as the program. */
int tt_plan_values(const tt_program *p, tt_plan_value *to, int capacity);
/* The plan as text, some lines, into `to` (always terminated). Returns the length it has or would have. */
size_t tt_plan_text(const tt_program *p, char *to, size_t capacity);
/* An SVG of the bytes in use at each instruction, by category. Returns as tt_plan_text; 0: out of memory. */
size_t tt_plan_svg(const tt_program *p, char *to, size_t capacity);
/* A line per instruction: op, name, operands with dtype, shape and offset; of a pipeline, of all its stages.
   Returns as tt_plan_text. */
size_t tt_program_text(const tt_program *p, char *to, size_t capacity);

/* Allocates the arena and fills the parameters. tt_set and the runs do it when it has not been done. On Linux
   TT_ERR_MEMORY, before anything is allocated, if the plan needs more of the host's memory than the machine,
   control groups and ulimit -v leave; TINYTRAIN_MEMORY_CHECK=0 in the environment leaves this out. */
tt_status tt_allocate(tt_program *p);
/* Copies `rows` rows of input v; the axis of v has that many rows in the next run. Set every input right
   before every run, after tt_update: something else may use its place. A run refuses an input that was
   overwritten. */
tt_status tt_set(tt_program *p, tt_value v, const void *data, int64_t rows);
/* The same on one data rank, 0 to tt_parallel.data - 1. tt_set is for programs with one. A run is one micro-
   batch on each of the first data ranks; in the last run of a step the last ranks may have none, and then no
   input is set there. */
tt_status tt_set_rank(tt_program *p, int rank, tt_value v, const void *data, int64_t rows);
/* An input of a program. */
typedef struct tt_input_info {
    const char *name;    /* lives as long as the program */
    tt_value value;
    tt_dtype dtype;
    int64_t rows, width; /* rows: the capacity, or the only number there may be */
    int axis;            /* inputs of one axis have equally many rows (tt_seq_start: one more); 0: `rows` */
    bool read;           /* false: nothing reads it, and it need not be set */
} tt_input_info;
/* The inputs in the order of their recording: at most `capacity` into `to`. Returns how many there are. */
int tt_program_inputs(const tt_program *p, tt_input_info *to, int capacity);
/* Copies value v (the root, or marked with tt_output) as floats, rows * width of them; after a run, before
   the next tt_set and before a program of the same arena runs. */
tt_status tt_get(tt_program *p, tt_value v, float *to, size_t capacity);
tt_status tt_get_rank(tt_program *p, int rank, tt_value v, float *to, size_t capacity); /* of a data rank */

typedef struct tt_stats {
    /* Mean over the targets of the step (all micro-batches), of all loss ops together. What is computed of
       them on the way to the root, as a sum or a factor, is not in it: tt_get gives the root, which is NaN
       where none of the targets of one of several loss ops counts. */
    double loss;
    double targets;       /* number of targets that counted (their weights' sum) */
    double correct;       /* of them, predicted right (cross-entropy) */
    double grad_norm;     /* before clipping; 0 when nothing was updated */
    double flops;         /* done by matmuls and attention, at the actual number of rows */
    int64_t step;         /* optimizer steps done so far */
    double loss_scale;    /* of the next step; 1 without loss scaling */
    int64_t skipped;      /* steps without an update so far: a scaled gradient overflowed, or tt_fit skipped
                             them */
} tt_stats;

/* One training step on the inputs as set: forward, backward, update with learning rate lr. A gradient or loss
   that is not finite gives TT_ERR_NUMERIC naming the first such tensor; parameters and optimizer stay as they
   were. (With update "backward" and a finite loss, only those whose gradients are not finite; load the last
   state to go on.) With loss scaling, such a gradient gives TT_OK, a lower scale and a step that is skipped
   (tt_stats.skipped), unless the scale would fall below 1.
   stats may be NULL. Then, on a device that works beside the host ("cuda", but with loss scaling, a pipeline
   or several processes), the call may return before the step is done, so that the caller makes the next batch
   in the meantime; what the step has found is read by the next step, or run of a program of the arena, before
   that changes anything, or by tt_wait, tt_get or tt_program_save. Its error is theirs: they fail as it would
   have, and do nothing else. tt_program_steps counts it as done. */
tt_status tt_step(tt_program *p, float lr, tt_stats *stats);
/* Waits for the step that was begun last, if nobody has, and fails as that did. stats (may be NULL): of the
   last step that updated or was skipped; zeros before the first. */
tt_status tt_wait(tt_program *p, tt_stats *stats);
/* The same in parts, for programs compiled with `accumulate`: tt_micro_step once per micro-batch, then
   tt_update, which divides by the targets of all together, so that 4 micro-batches of 4 equal one of 16. Of a
   tt_update without stats, results are read as late as tt_step's. */
tt_status tt_micro_step(tt_program *p, tt_stats *stats);
tt_status tt_update(tt_program *p, float lr, tt_stats *stats);
/* After tt_micro_step, before tt_update: tt_param_size floats, d(mean over the targets so far) / d(param).
   Not of pipelines. */
tt_status tt_get_gradient(tt_program *p, const tt_param *param, float *to);
tt_status tt_run(tt_program *p, tt_stats *stats); /* forward only (programs with train = false) */
int64_t tt_program_steps(const tt_program *p);    /* of the optimizer; not those that loss scaling skipped */

/* The whole state of a program that trains, in one safetensors file: parameters by their names, the
   optimizer's state with "exp_avg.", "exp_avg_sq." or "momentum_buffer." before them, and in the tensor
   "tinytrain.run" the number of steps, the loss scale and the seed, which all randomness comes from. Of
   frozen parameters, which may be most of a model, "tinytrain.frozen" has a hash each. With `tune`, the
   metadata "tinytrain.products" are the text of a file that it names. Between steps only.
   A program that was recorded and compiled in the same way and loads it goes on bit for bit as if it had
   never been stopped. Loading compares tensors, frozen parameters, precision, optimizer and seed, and changes
   nothing unless all of it fits; the logger is warned of another attribute of a recorded op or of the
   optimizer. After an error in reading the tensors themselves some are the file's: load again before the next
   step. tt_trainer_save and tt_trainer_load do this for a trainer. */
tt_status tt_program_save(tt_program *p, const char *path);
tt_status tt_program_load(tt_program *p, const char *path);
