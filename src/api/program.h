#pragma once
#include "standard.h"
#include "context.h"
#include "params.h"
#include "tape.h"

/* --------------------------------------------------------------------------------------------- optimizers */

/* Table of the optimizers: X(kind, name, op, decoupled, state, word, second state, its word). `op` computes
   the update. `decoupled`: weight decay bypasses the gradient. A state is a tensor that the op keeps for each
   parameter; NULL: none. In a saved state the tensor's name is the word, which is PyTorch's, and the name of
   the parameter, such as "exp_avg.head.weight". */
#define TT__OPTIMIZERS(X) \
    X(TT_SGD, "sgd", SGD, false, "momentum", "momentum_buffer", NULL, NULL) \
    X(TT_ADAM, "adam", ADAM, false, "m", "exp_avg", "v", "exp_avg_sq") \
    X(TT_ADAMW, "adamw", ADAM, true, "m", "exp_avg", "v", "exp_avg_sq") \
    X(TT_OPTIMIZER_CUSTOM, "custom", CUSTOM_UPDATE, false, "state 1", "state_1", "state 2", "state_2") \
    X(TT_LION, "lion", LION, true, "m", "exp_avg", NULL, NULL) \
    X(TT_MUON, "muon", MUON, true, "momentum", "momentum_buffer", NULL, NULL) \
    X(TT_ADAFACTOR, "adafactor", ADAFACTOR, true, "row_var", "row_var", "col_var", "col_var")
#define TT__KIND(kind, name, op, decoupled, state, word, second, its_word) kind,
typedef enum tt_optimizer_kind { TT__OPTIMIZERS(TT__KIND) } tt_optimizer_kind;
#undef TT__KIND

/* A factor on the learning rate of the parameters whose names match a pattern, as in tt_param_freeze. */
typedef struct tt_lr_rule { const char *pattern; float scale; } tt_lr_rule;

typedef struct tt_optimizer_options {
    /* Set it if your recipe trains with another optimizer; default TT_ADAMW (Loshchilov, Hutter 2019).
       TT_LION is Lion (Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023).
       TT_MUON is Muon (Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024) for
       the matrices of numbered layers (see layer_decay), and AdamW for all other parameters: embeddings,
       heads, norms and biases. Five Newton-Schulz steps in fp32 make the momentum of a matrix about
       orthogonal; torch.optim.Muon has these steps in bf16. The update of a (rows, cols) matrix is multiplied
       by 0.2 sqrt(max(rows, cols)), so that both kinds of parameters have the learning rate and the decay of
       AdamW (Liu et al., "Muon is Scalable for LLM Training", 2025; "match_rms_adamw" in PyTorch). `momentum`
       must be set, usually to 0.95, with nesterov. An update needs the whole matrix: data ranks that divide
       the momentum (parallel.zero) gather it. TT_MUON excludes parallel.tensor, parallel.server and update
       "host".
       TT_ADAFACTOR is Adafactor (Shazeer, Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory
       Cost", 2018, algorithm 4), as torch.optim.Adafactor with eps (1e-30, 1e-3), but the learning rate falls
       by the schedule alone. Its state is a float for each row and each column of a matrix; parameters of one
       row have a float for each element. A tensor of more than two dimensions is a matrix whose rows are
       those of its first dimension. The state is f32 in any precision, and is never divided. TT_ADAFACTOR
       excludes parallel.tensor, parallel.server and parallel.zero 2 and 3, because an update needs whole
       gradients. */
    tt_optimizer_kind kind;
    /* Set it, with kind TT_OPTIMIZER_CUSTOM, to train with an optimizer of your own; default NULL. The states
       are planned, saved, divided and offloaded as those of other optimizers. Only for device "cpu" and fp32
       weights. */
    const tt_custom_optimizer *custom;
    float momentum;                 /* Set it if SGD learns too slowly, usually to 0.9, and for Muon; default
                                       0: no momentum */
    bool nesterov;                  /* Set it, with a momentum, if your recipe has Nesterov's momentum in SGD
                                       or Muon; default false */
    float beta1, beta2, eps;        /* Set them if your recipe has other values for Adam or AdamW; default
                                       0.9, 0.999, 1e-8. Lion reads beta1 and beta2; its paper has 0.9 and
                                       0.99, a learning rate 3 to 10 times smaller than AdamW's and a weight
                                       decay 3 to 10 times larger */
    float weight_decay;             /* Set it higher if the model overfits, and to 0 for no decay; default
                                       0.01. SGD and ADAM add the decay to the gradient; the decay of
                                       ADAMW, LION, MUON and ADAFACTOR is decoupled */
    const char *const *no_decay;    /* Set it if other parameters than the 1-D ones (biases, norms) should
                                       have no decay: patterns of their names, ended by NULL; default NULL:
                                       1-D parameters. With an empty list all parameters decay */
    /* Set it to train some parameters faster or slower than others, such as a new head: rules, ended by a
       NULL pattern; default NULL. The first rule that matches a parameter's name gives its factor, >= 0;
       without a match it is 1. The factor also applies to the decoupled decay, as in PyTorch's parameter
       groups. The logger gets a warning for a pattern that no trained parameter matches. */
    const tt_lr_rule *lr_rules;
    /* Set it in fine-tuning, usually to 0.65 to 0.95, if the first layers should change less than the last:
       learning rates fall from the output to the input, 0 < layer_decay <= 1; default 1 (Clark et al.,
       "ELECTRA", 2020; Bao et al., "BEiT", 2022). The number of a layer is the first number in a parameter's
       name that follows '.', '_' or nothing, and that '.' or nothing follows: 3 in "encoder.layer.3.bias".
       With L layers, layer k has the factor layer_decay^(L - k). Parameters made before the first layer's,
       such as embeddings, have layer_decay^(L + 1); all other parameters have 1. Factors of lr_rules multiply
       these factors. */
    float layer_decay;
    /* Set it to evaluate and save averages of the weights, which fluctuate less than the weights of the last
       step, usually to 0.99 to 0.9999; default 0: none. In [0, 1). The exponential moving averages of the
       trained parameters are a further state of the optimizer. The first update copies the parameters; each
       later one sets average += (1 - ema_decay) * (parameter - average), as PyTorch's AveragedModel with
       get_ema_avg_fn. The averages are f32, so the parameters must be f32, too: precision "32-true" or one
       that ends with "-mixed". A saved state has them with "ema." before the names. See
       tt_trainer_use_ema. */
    float ema_decay;
    float clip_norm;                /* Set it, usually to 1, if single large gradients disturb the training:
                                       the largest norm of all gradients together; default 0: no limit */
    /* Set it, to 0.5 to 0.9, to train a model most of whose weights become 0: the share, below 1, of the
       weights that are pruned in the end; default 0: none. Pruned are the weights of smallest magnitude in
       each matrix of a numbered layer (see layer_decay), an exact number of them; equal magnitudes are pruned
       in the order of the weights. The share rises from 0 in step prune_begin to `prune` in step prune_end by
       the cubic schedule of Zhu, Gupta, "To prune, or not to prune", 2017; every prune_every steps, weights
       are chosen anew. A pruned weight stays 0. A mask of 1 bit a weight is a further state, which is planned
       and saved. Adapters and low-rank factors are not pruned, and weights that are rounded to binary
       numbers, which have no 0, are refused. Gradients of pruned weights still count for clip_norm. Several
       data ranks need parallel.zero 0. Excludes parallel.tensor, parallel.server, update "host" and
       ema_decay. */
    float prune;
    int64_t prune_begin, prune_end; /* Set prune_end, with `prune`, to a step well before the last: the steps
                                       in which the share begins to rise and reaches `prune`; default 0 */
    int prune_every;                /* Set it lower in a short run: steps between two choices of weights;
                                       default 100 */
    /* Set it, with `prune`, when you fine-tune a pretrained model: the weights of lowest movement are pruned,
       not those of smallest magnitude; default false (Sanh, Wolf, Rush, "Movement Pruning: Adaptive Sparsity
       by Fine-Tuning", 2020, which calls the movement importance score). From step 0 on, each step subtracts
       gradient * weight from the weight's movement, before the update and with the gradient as clipped:
       weights that move away from 0 gain. Equal movements are pruned in the order of the weights. In the
       paper a pruned weight can come back: its value is kept beside the model, and its movement goes on.
       Here, without such a copy, a pruned weight stays 0 and its movement stands still. The movements are a
       further state, which is planned and saved, with "movement." before the names: a float for each weight
       in any precision, since in 16 bits a sum would lose late terms. */
    bool prune_by_movement;
    /* Set it to 16 or 8 if the optimizer state needs too much memory: the bits of each number of the state;
       default 32. TT_STATE_BITS_BUDGET chooses 32 if memory_budget allows 32 without recomputation or copies
       that the options do not ask for, else those of 32, 16 and 8 with which a step takes the fewest seconds.
       The plan's text says which. It excludes parallel.pipeline.
       Parameters of fewer than 4,096 elements keep the state of 32 bits, and in the precisions
       "bf16-true" and "16-true", whose state has 16 bits anyway, 32 means these 16 bits. Moving averages
       (ema_decay) stay f32.
       16: bf16, with stochastic rounding. With rounding to nearest Adam's v could not fall: with beta2 0.999
       a step lowers v by at most 0.1%, less than half the distance of two bf16 numbers, 0.2% to 0.4%.
       8: block-wise dynamic quantisation (Dettmers et al., "8-bit Optimizers via Block-wise Quantization",
       2022), with the maps of bitsandbytes: one byte for each number, and a float for each 256 numbers, the
       largest magnitude among them. Each number is rounded to the nearest of the map. A tensor rank has
       blocks of its own, so that the bits depend on parallel.tensor, and a state resumes only with an equal
       number of tensor ranks. Not for TT_OPTIMIZER_CUSTOM, nor for TT_ADAFACTOR, whose state is small. */
    int state_bits;
#define TT_STATE_BITS_BUDGET (-1)
} tt_optimizer_options;
tt_optimizer_options tt_optimizer_options_default(void);

/* Table of the schedules of the learning rate: X(kind, name). WSD: warmup, stable, decay (Hu et al.,
   "MiniCPM", 2024): the learning rate is constant until the last decay_steps, in which it falls linearly or,
   with "wsd-sqrt", first steeply and then slowly: as `1 - sqrt(x)` after the fraction x of these steps
   (Haegele et al., "Scaling laws and compute-optimal training beyond fixed training durations", 2024). */
#define TT__SCHEDULES(X) \
    X(TT_CONSTANT, "constant") X(TT_LINEAR, "linear") X(TT_COSINE, "cosine") X(TT_WSD, "wsd") \
    X(TT_WSD_SQRT, "wsd-sqrt")
#define TT__KIND(kind, name) kind,
typedef enum tt_schedule_kind { TT__SCHEDULES(TT__KIND) } tt_schedule_kind;
#undef TT__KIND

typedef struct tt_schedule {
    tt_schedule_kind kind; /* Set it to TT_COSINE or TT_WSD if your recipe decays so, and to TT_CONSTANT for
                              no decay: how the learning rate changes after the warm-up */
    float lr, min_lr;      /* Set lr lower if the loss jumps or grows, and higher if it falls slowly; set
                              min_lr if the rate should not fall to 0. lr is the learning rate after the
                              warm-up: TT_CONSTANT keeps it, other kinds lower it to min_lr */
    int64_t warmup_steps;  /* Set it, often to 5% or 10% of total_steps, if the loss jumps in the first steps:
                              step s < warmup_steps uses lr * s / warmup_steps, as transformers does */
    int64_t total_steps;   /* Set it, except with TT_CONSTANT, to the steps of the whole run: warm-up and
                              decay together */
    int64_t decay_steps;   /* Set it with TT_WSD and TT_WSD_SQRT: the last steps, in which the rate falls, 1
                              to total_steps - warmup_steps */
    /* Set it if no kind fits: a function that returns the learning rate of a step; default NULL. All fields
       but `user`, its argument, are then ignored. A resumed run must be given the same function. */
    float (*lr_at)(void *user, int64_t step);
    void *user; /* argument of lr_at */
} tt_schedule;
float tt_schedule_lr(const tt_schedule *s, int64_t step); /* step counts from 0 */

/* Dynamic loss scaling (Micikevicius et al., "Mixed precision training", 2018), with PyTorch's names and
   defaults (GradScaler). init, growth and backoff are powers of two, so that scaling is exact. */
typedef struct tt_loss_scale {
    float init;    /* Set it lower if a run begins with many skipped steps: the scale of the first step,
                      1..2^40; default 65536 */
    float growth;  /* Set it to 1 if the scale should never grow: the factor of the scale after `interval`
                      steps without overflow, >= 1; default 2. A scale grows to 2^40 at most */
    float backoff; /* Set it lower if several steps in a row are skipped: the factor of the scale after an
                      overflow, below 1; default 0.5. A scale that falls below 1 is an error */
    int interval;  /* Set it lower in a short run, or if the scale should recover sooner: steps before a
                      growth, >= 1; default 2000 */
} tt_loss_scale;
tt_loss_scale tt_loss_scale_default(void);

/* ----------------------------------------------------------------------------------------------- programs */

/* Division of a program over the ranks of its device ("cpu*4" has four). A rank runs the whole program on
   its part of the data and its shards of the tensors. Tensor ranks are numbered first: rank = (stage * data +
   data rank) * tensor + tensor rank. */
typedef struct tt_parallel {
    /* Set `tensor` if a layer is too large or too slow for one device; `data` then follows. The fields are
       the numbers of ranks along each axis; default tensor 1, data 0: the device's ranks / tensor / pipeline.
       With several data ranks, gradients are divided by the loss's targets on all data ranks; several losses
       need tt_loss_total. Tensor ranks divide large embeddings. Tensor ranks also divide groups of 1,000,000
       weights or more: consecutive linear layers with the ops between them and, if the number of heads is a
       multiple of the number of tensor ranks, attention by heads. Each tensor rank computes everything else
       whole. tt_plan.split_params says how much is divided. If a program keeps a layer whole because the
       layer's hidden values are an output, later programs with the layer's parameters keep it whole. */
    int data, tensor;
    /* Set it higher if several data ranks need too much memory each, and to 0 to shard nothing: the tensors
       that are sharded over the data ranks; default 1 (Rajbhandari et al., "ZeRO", 2020). 0: none; 1: the
       optimizer's state; 2: also gradients, summed after each micro-batch; 3: also parameters. Tensors of
       fewer than 65,536 elements stay whole. TT_ZERO_BUDGET chooses from 1 to 3 the value that fits
       memory_budget in the fewest seconds (tt_compile_options.offload). If steps have several micro-batches,
       2 and 3 give other bits than 1 without reduce_micros. */
    int zero;
    bool server;        /* Set it if data rank 0 has memory to spare and the other ranks lack it: data rank 0
                           alone then holds the optimizer state and updates; needs zero 0 or 1; default
                           false */
    /* Set it, with tensor > 1, to save memory: the rows of activations between sharded layers are then
       divided; default false (Korthikanti et al., "Reducing activation recomputation in large transformer
       models", 2022). */
    bool sequence;
    /* Set it if runs on different numbers of data ranks should give the same bits: the largest of these
       numbers; default 0: data. `groups` is the number of leaves of the tree that sums gradients: micro-batch
       m of a step belongs to leaf m % groups, and the bits of a training depend on the tree, not on the
       number of data ranks. groups is a multiple of data; if `groups` is greater than data, data must be a
       power of two. */
    int groups;
    /* Set it if a run with zero 0 or 1 should give the bits of zero 2 and 3: the gradients of the ranks are
       then summed after each micro-batch, as zero 2 and 3 always do; default false: ranks sum once a step. */
    bool reduce_micros;
    /* Set it if the model is too large for one device and links between devices are slow: the number of
       stages of about equal FLOPs, each run by other ranks; default 1; 0 means 1. Cuts are at tt_block_end
       marks that only one value crosses. The micro-batches of a step follow each other through the stages in
       the order of `schedule`. "1f1b" (default, and NULL): a stage begins the backward of a micro-batch as
       soon as it can, so that stage s holds at most pipeline - s micro-batches (Narayanan et al.,
       "PipeDream", 2019, flushed at each step's end). "gpipe": backwards begin after all forwards, so that
       every stage holds all micro-batches of a step (Huang et al., "GPipe", 2019). The bits are those of one
       stage, except that gradients of a parameter that two stages use differ by rounding. pipeline excludes
       zero 2, 3 and TT_ZERO_BUDGET, server, reduce_micros and update "backward". */
    int pipeline;
    const char *schedule; /* Set it with `pipeline`, see there */
    /* Set it, with "gpipe" or with options that say "budget", to the largest number of micro-batches that a
       step has on a data rank; default 0: any number. "gpipe" needs `micros`, and a pipeline refuses more
       micro-batches. Options that say "budget" minimise the seconds of a step with `micros` micro-batches, by
       default with 1. */
    int micros;
} tt_parallel;
#define TT_ZERO_BUDGET (-1)
tt_parallel tt_parallel_default(void);

/* Rates of a rank and of its links, and the times that it takes to start work. The costs change plans, never
   bits. All are finite; the seconds are at least 0, the other fields above 0. */
typedef struct tt_costs {
    double product_16, product_f32;     /* FLOP/s of matrix products, with 16-bit and with fp32 operands */
    double attention_16, attention_f32; /* FLOP/s of attention and its backward */
    double rows_16, rows_f32;           /* bytes a second that norms, sums, losses and so on read and write */
    double update_16, update_f32;       /* bytes a second of the optimizer, for parameters in 16 bits and
                                           fp32 */
    double update_host;                 /* bytes a second of the optimizer in the host's memory, with
                                           update "host" */
    double memory;                      /* bytes a second of the device's memory, which no op exceeds */
    double to_host, from_host, between_ranks; /* bytes a second from the device to the host, from the host to
                                                 the device, and between ranks */
    double launch, barrier;             /* launch: seconds to start an op; barrier: seconds of a barrier
                                           before ranks move data */
} tt_costs;
/* Returns the costs of an imagined device, an A100 or H100 with PCIe 4: 300 TFLOP/s in 16 bits and 60 in
   fp32, 2 TB/s of memory, links of 25 GB/s to the host and 50 GB/s between ranks, 50 GB/s of updates in the
   host's memory; 3 us to start an op, 25 us for a barrier of the ranks. */
tt_costs tt_costs_default(void);
/* Measures the costs of a device, named as in tt_compile_options.device, in about a second: it trains a block
   of a transformer on all ranks, with tt_parallel.zero 1. On one rank, costs that need several ranks keep the
   values of tt_costs_default. Other programs that use the device meanwhile make the device seem slower. After
   an error *costs is unchanged. */
tt_status tt_measure_costs(tt_context *ctx, const char *device, tt_costs *costs);

typedef struct tt_compile_options {
    bool train; /* Clear it to evaluate, predict or generate: forward only, without dropout; default true:
                   backward and update */
    /* Set it to train in 16 bits, which takes less memory, and less time if the device multiplies 16-bit
       matrices faster; default "32-true". "bf16-mixed": bf16 activations and matrix products; fp32 weights,
       their gradients and optimizer state. "bf16-true": bf16 weights, gradients and optimizer state, with
       stochastic rounding. "16-mixed", "16-true": f16 instead of bf16, with loss scaling; but the optimizer
       state of "16-true" is bf16, with stochastic rounding, because Adam's v is often too small for f16. */
    const char *precision;
    /* Set it if a training in a mixed precision should round as PyTorch's autocast does, or save more memory:
       the dtype of the residual stream, "f32" (as PyTorch's autocast) or "16-bit"; default NULL: "f32" with
       "16-mixed", because residual sums could exceed the range of f16, else "16-bit". The residual stream has
       residual sums, the input of the first sum, and their gradients. Results of norms, activations and
       attention are always 16-bit. */
    const char *residual;
    /* Set it if a GPU should multiply matrices faster, with rounded operands; default "fp32": no rounding.
       Sums are fp32 except for fp8.
       "tf32": fp32 operands are rounded to 10 bits of mantissa (as PyTorch's
       set_float32_matmul_precision("high")), except in attention; other devices treat it as "fp32".
       "fp8": 16-bit operands of linear layers become E4M3, gradients E5M2 (Micikevicius et al.: "FP8 formats
       for deep learning", 2022). "fp8" needs "cuda" of compute capability 8.9, widths that are multiples of
       16, and a size at which fp8 is faster: 4,096 rows with widths of 1,024 are large enough, 6,144 rows
       with widths of 768 are not. A tensor is rounded once for all products that read it, and a tensor that
       only products of the backward read is saved in fp8. Each tensor is scaled by the largest power of two
       that keeps in range twice the tensor's largest magnitude of the 16 steps before (delayed scaling, as in
       NVIDIA's Transformer Engine); a
       run's state holds these magnitudes. Larger numbers saturate; numbers that are not finite become NaN. In
       a first step, without training, and on tensor ranks, the scale follows from the largest magnitude of
       the tensor itself. Hopper's tensor cores add products of fp8 in 14 bits (DeepSeek-V3, arXiv 2412.19437,
       section 3.3.2). For gradients cuBLASLt moves these sums to fp32 every few products; for results, for
       speed, only at the end, as Transformer Engine does. */
    const char *matmul;
    tt_loss_scale loss_scale; /* Set it if "16-mixed" or "16-true", which alone read it, skip too many steps;
                                 default tt_loss_scale_default() */
    /* Set it if the plan needs too much memory: the backward then recomputes values instead of saving them,
       which takes time; default "cheap". The bits are the same (except on "cuda": a tanh-GELU after a linear
       layer differs by rounding, because cuBLASLt computes it in the product).
       "none": nothing is recomputed. "cheap": results of layer norm, GELU and SiLU, 16-bit copies of weights,
       and rows that ranks gather for parallel.sequence; no matrix products. "attention": also results of
       attention. "blocks": everything that the backward reads of the blocks that tt_block_end marks, except
       the last block, with which the backward begins (Chen et al., "Training deep nets with sublinear memory
       cost", 2016). "budget": the cheapest choice of values that makes the plan fit memory_budget, which must
       be set; ends of blocks are saved. The cost is FLOPs if nothing is offloaded and parameters are not
       sharded (parallel.zero 3), else seconds by `costs`. */
    const char *recompute;
    /* Set it if the plan needs more memory than the device has: the tensors that the option lists are stored
       in the host's memory and copied to the device only while it uses them; default NULL or "none": nothing.
       The bits are the same.
       The list, separated by commas, may have "optimizer" (its state), "gradients" (from the end of the
       backward, or of a micro-batch, to the update), "parameters" and "activations" (what the backward reads
       of the blocks that tt_block_end marks, except the last). Tensors of a parameter of fewer than 65,536
       elements, and smaller activations, stay on the device. Programs that share parameters must agree on
       "parameters". On "cpu" offload only adds copies, for tests.
       "budget": the tensors that make the plan fit memory_budget in the fewest seconds, by `costs`;
       activations come from as many first blocks as necessary; on "cpu" nothing. On "cuda" the linear layers
       of one x then remain separate products (see DETERMINISM), so the bits may differ. */
    const char *offload;
    /* Set it to run a program that is larger than the GPU's memory, on device "cuda" with one rank; default
       "device" or NULL. The bits are the same. "device": the arena is the GPU's own memory. "managed": CUDA's
       unified memory; tt_allocate refuses an arena of more bytes than the GPU has free, with TT_ERR_MEMORY.
       "managed-oversubscribed": the arena may be larger. CUDA is then asked to keep the resident workspace on
       the GPU. Half of the memory that is still free is for parameters, gradients and optimizer state, in the
       order of their use. All other values are fetched before the instructions that need them, at most two
       windows of instructions ahead (the values of a window take at most a quarter of the memory that is then
       left); CUDA decides when values leave the GPU. A step takes as long as these copies, and is not
       captured as a graph. Prefer `offload`, which is planned. Needs a GPU with concurrentManagedAccess
       (Linux, but not WSL). */
    const char *memory;
    /* Set it to make matrix products faster on device "cuda"; default "off" or NULL. "off": each product uses
       the algorithm that cuBLASLt's heuristic offers first.
       "on": the first run measures, once for each kind of product of all programs of the arena at full
       capacity, the algorithms that cuBLASLt offers. The first run also compares work inside of the product
       (GELU and its slope, sums of columns) with separate kernels of the library. The measurement takes
       memory of the device beside the plan and gives it back; without enough memory a product is as with
       "off", and the logger gets a warning. If a run has fewer rows, rounded up to a multiple of 128, a
       product keeps the choice of kernels, but not the algorithm. A run's state holds the choices, and a
       resumed run makes no new ones.
       Any other word names a file: as "on", but choices in the file are not measured, and new choices are
       added to it. A damaged file, and a file of another kind of GPU or another cuBLASLt, is refused. See
       DETERMINISM. */
    const char *tune;
    bool accumulate; /* Set it for steps of several micro-batches: gradients persist between them; default
                        false */
    /* Set it to read gradients after a step as well (tt_get_gradient), until the next step begins; default
       false. The plan then keeps all gradients. keep_gradients excludes update "backward", which reuses the
       memory of gradients, and parallel.pipeline. */
    bool keep_gradients;
    /* Set it to read or change gradients before an update; default NULL. The function is called with `user`
       in each step (counted from 0), when the step's gradients are complete and before the update reads them.
       It may call tt_get_gradient, tt_set_gradient and tt_param_get. If it returns an error, the step updates
       nothing and fails with that error. With several processes it is called in each. before_update implies
       keep_gradients. */
    tt_status (*before_update)(void *user, tt_program *p, int64_t step);
    void *user; /* argument of before_update */
    /* Set it if gradients or the optimizer state need too much memory: parameters are then updated earlier
       or elsewhere; default "end": all at the end of the step.
       "backward": each parameter is updated as soon as its gradient is final, and the gradient's memory is
       then free, for the same bits (as Lv et al., "Full parameter fine-tuning for large language models with
       limited resources", 2023). "end" keeps all gradients, partly in the memory of activations that the
       backward has freed; "backward" saves the other part, which is large with small batches. "backward"
       excludes accumulate, keep_gradients, before_update, clip_norm, loss scaling and parallel.server, which
       need all gradients at once, and parallel.pipeline.
       "host": at the end of the step the host's processor updates parameters in the host's memory (Ren et
       al., "ZeRO-Offload", 2021), where the optimizer state stays. Groups of gradients and parameters are
       copied to the host, and parameters back, while other groups are updated, at most two groups ahead.
       Parameters of fewer than 65,536 elements are updated on the device. Results have the bits of updates on
       device "cpu"; on "cuda", "end" gives other bits. No other option chooses "host". */
    const char *update;
    /* Set its fields if your recipe has another optimizer or other values; default:
       tt_optimizer_options_default(). */
    tt_optimizer_options optimizer;
    /* Set it if the program must fit a given memory: the limit of the arena in bytes; default 0: no limit. On
       "cpu" the limit includes the tensors that `offload` keeps beside the arena. If the program, or a
       program that shares the arena later, needs more, tt_compile of that program fails with TT_ERR_BUDGET.
       tt_error then says what each option would save, the smallest possible size and its options, and what
       "bf16-true" would need; for a pipeline, tt_error speaks of the stage that needs most. Only options that
       say "budget" (recompute, offload, parallel.zero) change to fit; tt_plan has their new values. Whatever
       the options, copies run less far ahead, and updates move less data together (at most 32 MiB, at least
       one parameter), if only then the plan fits. */
    size_t memory_budget;
    /* Set it if an option says "budget", or if you want to know the seconds of a step before it runs: the
       costs of your device, from tt_measure_costs; copied; default NULL: tt_costs_default(). The seconds of
       tt_plan, the overlap of copies with computation, and choices by "budget" follow from the costs. */
    const tt_costs *costs;
    /* Set it to run on a GPU or on several ranks: "cpu", "cuda", or a numbered device, "cuda:1"; default
       NULL: TINYTRAIN_DEVICE in the environment, else "cpu". Several ranks: "cpu*4" (the context's threads
       are divided among them), "cuda*8", "cuda:0,2", and "cuda:0,0", two ranks on one GPU. A program for a
       kind of device that this build cannot run can still be planned: its plan counts its parameters in full,
       its parameters reserve no memory, and tt_allocate, tt_set and runs fail with TT_ERR_UNSUPPORTED (or
       TT_ERR_DEVICE, if the device is absent or has failed). */
    const char *device;
    tt_parallel parallel; /* Set its fields if the device has several ranks; default: tt_parallel_default() */
    /* Set it if two programs never run at once, such as training and evaluation, so that they need only the
       memory of the larger: a program of the same device, whose arena this one uses; default NULL: an arena
       of its own. Each program's runs overwrite the other's inputs. An arena that is allocated does not grow:
       compile the program that needs most first. */
    const tt_program *share;
} tt_compile_options;
tt_compile_options tt_compile_options_default(void);
/* Checks options as tt_compile does before it reads the tape. One message names all unknown words and all
   options that contradict one another. If fields of o->parallel are 0, the function sets them to the values
   that 0 stands for on o->device. After an error *o is unchanged. */
tt_status tt_check_options(tt_context *ctx, tt_compile_options *o);
/* Returns word k that an option accepts, or NULL if the option has at most k words or is not in this list:
   "optimizer", "schedule" (words in the order of the enums), "precision", "matmul", "recompute", "memory",
   "update" and "parallel.schedule". */
const char *tt_option_word(const char *option, int k);

/* Compiles a tape: differentiates it, rewrites it and places its values; allocates no tensor. root: the loss
   (1, 1) to train on, or any value when train is false. The tape is copied and does not change, so it can be
   compiled again with other options; its values are valid in every program. NULL options: defaults. Returns
   NULL on error. */
tt_program *tt_compile(tt_tape *t, tt_value root, const tt_compile_options *o);
void tt_program_free(tt_program *p);

/* Returns the largest number n, up to `max`, of rows, sequences or whatever `record` counts, with which a
   program fits o->memory_budget: a program of n fits, and, below `max`, a program of n + 1 does not. (If an
   option such as recompute is "budget", a still larger program might fit again.) record(user, t, n) records a
   micro-batch of n on a new tape, with parameters that already exist, and returns the root. The function only
   makes about ten plans: it allocates nothing, and works for a kind of device that this machine lacks.
   memory_budget 0 stands for the free memory of the GPU (of several GPUs, the one with the least) less 256
   MiB, at most an eighth, for CUDA itself; on the CPU 0 is refused. Returns 0 after an error, which is the
   plan's error if not even n = 1 fits. For a trainer use tt_largest_micro_batch. */
int64_t tt_largest_batch(tt_context *ctx, tt_value (*record)(void *user, tt_tape *t, int64_t n), void *user,
                         const tt_compile_options *o, int64_t max);

typedef enum tt_category {
    TT_MEM_PARAMETERS, TT_MEM_GRADIENTS, TT_MEM_OPTIMIZER, TT_MEM_ACTIVATIONS, TT_MEM_WORKSPACE,
    TT_MEM_INPUTS, TT_MEM_CATEGORIES
} tt_category;
const char *tt_category_name(tt_category c);

typedef struct tt_plan {
    const char *device;                /* kind of device: "cpu", "cuda" */
    int ranks, data, tensor, pipeline; /* number of all ranks, and numbers of ranks along each axis
                                          (tt_parallel) */
    int64_t params, split_params;      /* params: numbers in the program's parameters; split_params: numbers
                                          in those parameters that are sharded over the tensor ranks */
    size_t bytes;                      /* the arena: exactly this much is allocated. If an earlier program's
                                          arena holds parameters, only that program's plan counts them.
                                          `bytes` and the fields below describe rank 0, which has most */
    size_t min_bytes;                /* smallest arena of any rank, in bytes: less than `bytes` if rank 0 is a
                                        parameter server */
    /* Bytes that a rank loads from other ranks' memory in a step of one full micro-batch on each data rank
       (the largest of all ranks), and the smallest number of bytes with which any method could do the same.
       For a sum over n ranks that number is 2 * (n - 1) / n times the tensor's bytes; half of that if each
       rank needs only its shard, and also half for gathering the shards. A server sums alone: it loads the
       gradients of all other ranks, and each of them loads all parameters. min_moved_bytes leaves out
       bookkeeping (norms, losses). */
    size_t moved_bytes, min_moved_bytes;
    /* Bytes that all ranks of this process together send to other processes in a step of one full micro-batch
       on each data rank, and the smallest number of bytes with which any method could do the same. 0 with one
       process. */
    size_t sent_bytes, min_sent_bytes;
    size_t persistent_bytes;           /* bytes of the parameters, the optimizer state, kept gradients and the
                                          resident workspace */
    /* Bytes of the host's memory: settings and results of runs, and what tt_compile_options.offload keeps
       there, where programs that share an arena share the parameters. If the device has its own memory, also
       two buffers for each input, from which it is copied to the device, and a buffer of 64 KiB that the
       programs of an arena share; with several ranks, each has 4 MiB more that all programs share. With
       several processes, each rank has 8 MiB for messages, on any device. A pipeline adds the inputs of
       parallel.micros micro-batches of a data rank (of one micro-batch if `micros` is 0; further
       micro-batches are allocated when they come), and, if devices have their own memory, each micro-batch's
       values in transit from a stage to another process. */
    size_t host_bytes;
    /* Bytes that a rank copies between device and host because of `offload`, in a step of one full
       micro-batch on each data rank, and in each further micro-batch. */
    size_t transfer_bytes, transfer_micro_bytes;
    /* Bytes in use while parameters are initialised or loaded: the parameters, the resident workspace and the
       buffer through which they stream. No other part of the arena is touched before the first step. */
    size_t init_bytes;
    /* Estimated seconds of a step with one full micro-batch on each data rank, by tt_compile_options.costs:
       computation, the time that computation waits for links, and the part of the computation that the host's
       processor does (update "host") while the device waits. Without `costs` the seconds describe no
       particular GPU. */
    double compute_seconds, exposed_seconds, host_seconds;
    double micro_compute_seconds, micro_exposed_seconds; /* seconds that each further micro-batch adds to
                                                            compute_seconds and exposed_seconds */
    size_t lower_bound_bytes;          /* largest number of bytes live at one instruction: no placement needs
                                          less */
    size_t at_peak[TT_MEM_CATEGORIES]; /* bytes of each category that are live at the peak instruction */
    int peak_instruction;              /* number of the peak instruction */
    char peak_name[96];                /* the peak instruction, such as "attention_backward layer.3" */
    int instructions, values;
    double flops;                      /* FLOPs of matrix products and attention in a run with the full
                                          capacity of rows */
    double extra_flops;                /* FLOPs, counted in `flops`, of what the backward recomputes */
    /* The options that the program follows, after the choices of options that say "budget". */
    const char *recompute;             /* the option recompute, with the choice that "budget" led to */
    int recomputed;                    /* number of values that the backward of a micro-batch recomputes */
    size_t recomputed_bytes;           /* bytes of the recomputed values */
    const char *offload;               /* the option offload, with the choice that "budget" led to; "none" if
                                          nothing is offloaded */
    int offload_blocks;                /* number of blocks, counted from the first, whose activations are
                                          offloaded */
    int zero;                          /* tt_parallel.zero */
    int ahead;                         /* max number of blocks by which copies and collectives run ahead of
                                          the computation */
} tt_plan;
/* Returns the plan; nothing need be allocated. For a pipeline this plan and all reports describe the stage
   that needs most bytes, for one micro-batch; but `params`, `flops` and `extra_flops` count all stages. */
tt_plan tt_program_plan(const tt_program *p);
tt_plan tt_stage_plan(const tt_program *p, int stage); /* plan of a stage, from 0 to pipeline - 1 */

/* A piece of the arena that holds a value. Views of the value, and values computed in its place, share the
   piece. */
typedef struct tt_plan_value {
    /* name of the value that the piece holds at the peak; of a workspace, the name of its op */
    const char *name;
    tt_category category;
    size_t bytes;
    int first, last;  /* first and last instruction that use the piece */
} tt_plan_value;
/* Writes the pieces that are live at the peak instruction, largest first, at most `capacity` of them. Returns
   the number of live pieces, whose bytes add up to tt_plan.at_peak, or 0 when out of memory. Names live as
   long as the program. */
int tt_plan_values(const tt_program *p, tt_plan_value *to, int capacity);
/* Writes the plan into `to` as some lines of text, always terminated. Returns the length of the full text,
   even if `capacity` cuts it. */
size_t tt_plan_text(const tt_program *p, char *to, size_t capacity);
/* Writes into `to` an SVG picture of the bytes in use at each instruction, by category. Returns the length of
   the full text, or 0 when out of memory. */
size_t tt_plan_svg(const tt_program *p, char *to, size_t capacity);
/* Writes into `to` a line for each instruction (for a pipeline, of all stages): op, name, operands with
   dtype, shape and offset; always terminated. Returns the length of the full text. */
size_t tt_program_text(const tt_program *p, char *to, size_t capacity);

/* Allocates the arena and fills the parameters. tt_set and the runs call tt_allocate if necessary. On Linux
   the function returns TT_ERR_MEMORY, before it allocates anything, if the plan needs more of the host's
   memory than the machine, control groups and ulimit -v leave; TINYTRAIN_MEMORY_CHECK=0 in the environment
   turns this check off. */
tt_status tt_allocate(tt_program *p);
/* Copies `rows` rows to input v; `rows` is then the number of rows of v's axis in the next run. Set every
   input right before every run, after tt_update: other values may use an input's place. A run refuses an
   input that was overwritten. For programs with one data rank. */
tt_status tt_set(tt_program *p, tt_value v, const void *data, int64_t rows);
/* Copies `rows` rows to input v of one data rank, 0 to tt_parallel.data - 1. A run is one micro-batch on each
   of the first data ranks; in the last run of a step the last ranks may have no micro-batch: then set no
   input of these ranks. */
tt_status tt_set_rank(tt_program *p, int rank, tt_value v, const void *data, int64_t rows);
/* An input of a program. */
typedef struct tt_input_info {
    const char *name;    /* lives as long as the program */
    tt_value value;
    tt_dtype dtype;
    int64_t rows, width; /* rows: the capacity, or the fixed number */
    int axis;            /* inputs of one axis have equally many rows (tt_seq_start: one more); 0: rows are
                            fixed */
    bool read;           /* false: nothing reads the input, which need not be set */
} tt_input_info;
/* Writes the program's inputs in the order of their recording, at most `capacity` of them. Returns the number
   of all inputs. */
int tt_program_inputs(const tt_program *p, tt_input_info *to, int capacity);
/* Copy value v (the root, or a value marked with tt_output) as rows * width floats; tt_get_rank copies the
   value of a data rank. Call the functions after a run, before the next tt_set and before another program of
   the arena runs. */
tt_status tt_get(tt_program *p, tt_value v, float *to, size_t capacity);
tt_status tt_get_rank(tt_program *p, int rank, tt_value v, float *to, size_t capacity);

typedef struct tt_stats {
    /* Mean loss over the targets of all micro-batches of the step and of all loss ops together. Ops between
       the losses and the root, such as a sum or a factor, do not change this mean: tt_get gives the root,
       which is NaN if a program has several loss ops and no target of one op counts. */
    double loss;
    double targets;       /* number of targets that counted (the sum of their weights) */
    double correct;       /* targets predicted right (cross-entropy) */
    double grad_norm;     /* norm of the gradient before clipping; 0 when nothing was updated */
    double flops;         /* FLOPs of matrix products and attention, for the actual number of rows */
    int64_t step;         /* optimizer steps done so far */
    double loss_scale;    /* loss scale of the next step; 1 without loss scaling */
    int64_t skipped;      /* steps without an update so far: a scaled gradient overflowed, or tt_fit skipped
                             them */
    double margin;        /* sum of the margins of tt_preference_loss; 0 without this loss */
} tt_stats;

/* Runs one training step on the inputs that were set: forward, backward, update with learning rate lr. If a
   gradient or the loss is not finite, tt_step returns TT_ERR_NUMERIC and names the first tensor that is not;
   parameters and optimizer stay unchanged. (With update "backward" and a finite loss, only the parameters
   whose gradients are not finite stay unchanged; load the last state to continue.) With loss scaling, a
   gradient that is not finite gives TT_OK, a lower scale and a skipped step (tt_stats.skipped), unless the
   scale would fall below 1.
   stats may be NULL. Then, on a device that works in parallel with the host ("cuda", but not with loss
   scaling, a pipeline or several processes), the call may return before the step is done, so that the caller
   can make the next batch meanwhile. The next step, the next run of a program of the arena, tt_wait, tt_get
   or tt_program_save reads the results of the step before it changes anything. If the step failed, that call
   fails with its error and does nothing else. tt_program_steps counts the step as done. */
tt_status tt_step(tt_program *p, float lr, tt_stats *stats);
/* Waits for the last step, unless another call has done so, and returns the step's error. stats (may be NULL)
   describes the last step that updated or was skipped; zeros before the first such step. */
tt_status tt_wait(tt_program *p, tt_stats *stats);
/* Run a step in parts, in programs compiled with `accumulate`: call tt_micro_step once per micro-batch, then
   tt_update, which divides by the targets of all micro-batches, so that 4 micro-batches of 4 equal 1 of 16.
   tt_update without stats may return before the update is done, as tt_step may. */
tt_status tt_micro_step(tt_program *p, tt_stats *stats);
tt_status tt_update(tt_program *p, float lr, tt_stats *stats);
/* Copies a gradient: tt_param_size floats, d(mean over the targets so far) / d(param), before clipping. Call
   it after tt_micro_step, before tt_update; in before_update; or, with keep_gradients, after a step whose
   loss was finite. After a step it is refused with several data ranks or groups, whose gradients the step
   sums in place. Not for pipelines. */
tt_status tt_get_gradient(tt_program *p, const tt_param *param, float *to);
/* Replaces a gradient, given as tt_get_gradient gives it and rounded to the gradient's dtype. Call it in
   before_update, or between tt_micro_step and tt_update. Norm, clipping and update then use the new values.
   Only for one data rank and one group. */
tt_status tt_set_gradient(tt_program *p, const tt_param *param, const float *from);
tt_status tt_run(tt_program *p, tt_stats *stats); /* runs the forward of a program with train = false */
int64_t tt_program_steps(const tt_program *p);    /* optimizer steps done; steps that loss scaling skipped do
                                                     not count */

/* Save and load the whole state of a program that trains, in one safetensors file, between steps: parameters
   by their names; the optimizer state with "exp_avg.", "exp_avg_sq." or "momentum_buffer." before the
   names (of states in 8 bits the codes, of dtype U8, and with "exp_avg_scale." and so on the scales); and in
   the tensor "tinytrain.run" the number of steps, the loss scale and the seed, from which all random numbers
   derive. Frozen parameters, which may be most of a model, are only hashed, in
   "tinytrain.frozen". With `tune`, the metadata "tinytrain.products" hold the text of a tune file. The
   metadata "tinytrain.other_model" of a trainer's state hold a hash of the model that gave the logits of
   tt_teacher_new or the reference of pairs of answers.
   A program that was recorded and compiled in the same way loads the state and continues bit for bit as if it
   had never been stopped. Loading compares tensors, frozen parameters, precision, optimizer and seed, and
   changes nothing unless all of them match; the logger gets a warning if another attribute of a recorded op
   or of the optimizer differs. After an error while the tensors themselves are read, some already hold the
   file's values: load again before the next step. tt_trainer_save and tt_trainer_load do this for a
   trainer. */
tt_status tt_program_save(tt_program *p, const char *path);
tt_status tt_program_load(tt_program *p, const char *path);
