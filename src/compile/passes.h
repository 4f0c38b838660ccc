#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../passes/verify.h"
#include "../passes/differentiate.h"
#include "../passes/rows.h"
#include "../passes/tensor.h"
#include "../passes/fuse.h"
#include "../passes/round.h"
#include "../passes/precision.h"
#include "../passes/recompute.h"
#include "../passes/step.h"
#include "../passes/stages.h"
#include "../passes/data.h"
#include "../passes/update.h"
#include "../passes/fp8.h"
#include "../passes/offload.h"
#include "../passes/prune.h"
#include "../passes/overlap.h"
#include "../passes/join.h"
#include "program.h"

/* ---------------------------------------------------------------------------------------- the list of passes
   Runs the passes over a tape, in their order. */

/* Fails if a parameter has changed since the tape read it, or cannot be trained as tt_param_store says. */
static tt_status tt__check_forms(tt_tape *t, bool train)
{
    for (int32_t v = 1; v < t->n_values; v++) {
        const tt__tape_value *x = &t->values[v];
        if (x->storage != TT__PARAMETER || x->base != v) continue;
        const tt_param *p = t->ctx->params[x->param];
        const int64_t rows = p->ndim > 1 ? p->dims[0] : 1;
        if (x->shape.rows != rows || x->shape.cols != p->size / rows || p->low_a)
            return tt__fail(t->ctx, TT_ERR_ARGUMENT, "the tape read parameter '%s' before %s: record a new "
                            "tape", p->name, p->low_a ? "tt_param_low_rank gave it factors" :
                            "pruning changed its shape");
        if (x->shape.dtype != p->form)
            return tt__fail(t->ctx, TT_ERR_ARGUMENT, "the tape read parameter '%s' before tt_param_store "
                            "changed its format: call tt_param_store before recording", p->name);
        if (train && tt__is_coded(p->form) && !p->frozen)
            return tt__fail(t->ctx, TT_ERR_ARGUMENT, "parameter '%s' is stored as %s, so it cannot be "
                            "trained: freeze it (tt_param_freeze), or do not store it in few bits", p->name,
                            tt_dtype_name(p->form));
    }
    return TT_OK;
}

/* Sets needs_grad of each value anew: whether the value depends on a trainable parameter. Parameters may have
   been frozen or unfrozen since the tape was recorded. */
static void tt__mark_gradients(tt_tape *t)
{
    for (int32_t v = 1; v < t->n_values; v++) {
        tt__tape_value *x = &t->values[v];
        x->needs_grad = x->storage == TT__PARAMETER && !t->ctx->params[x->param]->frozen;
    }
    for (int k = 0; k < t->n_code; k++) {
        bool needs = false;
        for (int j = 0; j < TT__MAX_IN; j++) needs |= t->values[t->values[t->code[k].in[j]].base].needs_grad;
        t->values[t->code[k].out[0]].needs_grad = needs;
    }
    for (int32_t v = 1; v < t->n_values; v++)
        t->values[v].needs_grad = t->values[t->values[v].base].needs_grad;
}

/* Runs a pass and then the verifier. After an error, returns from the enclosing function. */
#define TT__PASS(t, name, call) \
    do { \
        tt_status passed = (call); \
        if (passed == TT_OK) passed = tt__verify((t), (name)); \
        if (passed != TT_OK) return passed; \
    } while (0)

/* Runs the first passes, which also append the loss's backward if the program trains. Only the
   fields of a tt__choice that tt__spread_tape reads affect these passes. */
static tt_status tt__first_passes(tt__built *b, const tt__settings *s)
{
    tt_tape *t = b->t;
    const bool train = s->options.train, accumulate = s->options.accumulate;
    const bool persist = accumulate || tt__keeps_gradients(&s->options);
    const int tensor = s->options.parallel.tensor;
    int losses = 0, totals = 0;
    TT__PASS(t, "record", TT_OK);
    TT__PASS(t, "inference", tt__pass_inference(t, b->root, s->dropout));
    TT__PASS(t, "prune", tt__pass_prune(t, b->root, false));
    TT__PASS(t, "rows", tt__pass_rows(t, b->root));
    if (t->stages > 1) TT__PASS(t, "ends of stages", tt__pass_ends(t));
    if (tensor > 1) TT__PASS(t, "tensor", tt__pass_tensor(t, b->root, tensor, s->options.parallel.sequence,
                                                          train));
    TT__PASS(t, "fuse", tt__pass_fuse(t, b->root, false));
    TT__PASS(t, "round", tt__pass_round(t, train && s->options.optimizer.prune > 0));
    TT__PASS(t, "precision", tt__pass_precision(t, &s->precision));
    if (t->stages > 1) tt__number_stages(t);
    for (int k = 0; k < t->n_code; k++) {
        losses += tt__is(&t->code[k], TT__LOSS) && !t->code[k].attr.uncounted;
        totals += tt__is(&t->code[k], TT__LOSS) && t->code[k].attr.by_total;
    }
    t->by_totals = losses && totals == losses;
    tt_status status = losses ? tt__new_results(t, train, s->scales) : TT_OK;
    if (status == TT_OK && t->accumulate && losses > 1 && !t->by_totals)
        status = tt__fail(t->ctx, TT_ERR_UNSUPPORTED, "%s cannot count the targets of %d losses before the "
                          "first backward: give each loss the number of its targets in a step by "
                          "tt_loss_total (%d of them have one)", accumulate ? "accumulate" :
                          "several data ranks", losses, totals);
    if (status != TT_OK) return status;
    if (train) TT__PASS(t, "differentiate", tt__differentiate(t, b->root, persist && !t->sums_micros));
    if (train && tensor > 1) TT__PASS(t, "tensor gradients", tt__pass_tensor_gradients(t));
    if (train && !losses)
        return tt__fail(t->ctx, TT_ERR_ARGUMENT, "the root '%s' depends on no loss: compute it from a loss "
                        "such as tt_cross_entropy or tt_mean_squared_error", t->values[b->root].name);
    TT__PASS(t, "fuse later", tt__pass_fuse(t, b->root, true));
    if (s->matmul == TT__MATMUL_FP8) TT__PASS(t, "number factors", tt__pass_number_factors(t, train));
    b->forward_values = t->n_values;
    const int forward = tt__forward_of(t), max = train ? tt__blocks_to_recompute(t, forward, INT_MAX) : 0;
    while (tt__blocks_to_recompute(t, forward, b->blocks) < max) b->blocks++;
    return TT_OK;
}

/* Runs the last passes: recomputation, collectives, updates, offload and overlap. */
static tt_status tt__last_passes(tt__built *b, const tt__settings *s, const tt__choice *choice)
{
    tt_tape *t = b->t;
    const bool train = s->options.train, persist = s->options.accumulate || tt__keeps_gradients(&s->options);
    if (train) TT__PASS(t, "recompute", tt__pass_recompute(t, choice->recompute, choice->blocks,
                                                                choice->drop, choice->n_drop));
    if (s->kind->host) TT__PASS(t, "fold casts", (tt__pass_fold_casts(t), TT_OK));
    else TT__PASS(t, "alike operands", tt__pass_alike_operands(t));
    if (t->tensor > 1) TT__PASS(t, "tensor losses", tt__pass_tensor_losses(t));
    TT__PASS(t, "counts", tt__pass_counts(t));
    if (t->stages > 1) TT__PASS(t, "stages", tt__pass_stages(t));
    TT__PASS(t, "gather", tt__pass_gather(t));
    if (train) TT__PASS(t, "sums", tt__pass_sums(t, persist));
    if (train) TT__PASS(t, "update", tt__pass_update(t, &s->options.optimizer, &s->options.loss_scale));
    if (s->matmul == TT__MATMUL_FP8) TT__PASS(t, "fp8", tt__pass_fp8(t));
    TT__PASS(t, "prune", tt__pass_prune(t, b->root, true));
    TT__PASS(t, "offload", tt__pass_offload(t, b->root, choice->offload, choice->activations,
                                             choice->halved));
    TT__PASS(t, "settings", tt__pass_settings(t));
    /* Products are not joined if bits must not depend on the number of ranks, or if memory is scarce. */
    const bool spread = t->data > 1 || t->slots > 1 || t->tensor > 1;
    const bool scarce = s->options.memory_budget || choice->offload;
    if (!s->kind->host && !spread && !scarce) TT__PASS(t, "join", tt__pass_join(t, b->root));
    TT__PASS(t, "overlap", tt__pass_overlap(t, &s->costs, choice->ahead));
    if (choice->arrivals) TT__PASS(t, "arrivals", tt__pass_arrivals(t));
    return TT_OK;
}
#undef TT__PASS
