#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../files/lists.h"
#include "../models/layout.h"
#include "../models/bert.h"
#include "../models/vit.h"
#include "../models/lm_tape.h"
#include "../models/prune.h"
#include "../run/step.h"
#include "trainer.h"

/* ------------------------------------------------------------------------------------------------ importance
   How much the loss depends on the heads, the neurons and the layers of a model. A mask is a factor, 1, of a
   unit's output. Its gradient is the sum of w * dw over the columns of the weight w that read the unit, so
   that no op is needed for masks. */

typedef struct tt__importance_run {
    const tt__units *u;
    tt_importance *x;
    float *w, *dw;  /* values and gradient of the largest weight */
    double *sum;    /* gradients of the masks of a layer's units */
} tt__importance_run;

/* Adds to r->sum the gradients of the masks of `units` units, each of which has equally many columns of a
   weight, and the absolute values to `to`. Adds the sum of the gradients to *layer. offset: that of the
   parameter in the struct of a layer. to NULL: the parameter is a bias. */
static tt_status tt__mask_gradients(tt__importance_run *r, tt_program *p, int l, size_t offset, int units,
                                    double *to, double *layer)
{
    const char *of = (const char *)tt__pointer_at(r->u->self, r->u->a->layers_at);
    const tt_param *param = (const tt_param *)tt__pointer_at(of + (size_t)l * r->u->a->layer_bytes, offset);
    if (!param) return TT_OK;
    const int64_t cols = to ? param->dims[1] : param->size, size = tt__max(1, cols / units);
    tt_status status = tt_param_get(param, r->w);
    if (status == TT_OK) status = tt_get_gradient(p, param, r->dw);
    for (int k = 0; k < units; k++) r->sum[k] = 0;
    for (int64_t k = 0; k < param->size && status == TT_OK; k++)
        r->sum[to ? k % cols / size : 0] += (double)r->w[k] * (double)r->dw[k];
    for (int k = 0; k < units; k++) {
        if (to) to[k] += fabs(r->sum[k]);
        *layer += r->sum[k];
    }
    return status;
}

/* Adds the importance of a step's examples, before the step's update. */
static tt_status tt__importance_step(void *user, tt_program *p, int64_t step)
{
    tt__importance_run *r = (tt__importance_run *)user;
    const tt__units *u = r->u;
    tt_status status = TT_OK;
    (void)step;
    for (int l = 0; l < u->layers && status == TT_OK; l++) {
        double layer = 0, *heads = r->x->head + (int64_t)l * u->heads;
        double *neurons = r->x->neuron + (int64_t)l * u->neurons;
        status = tt__mask_gradients(r, p, l, u->out_w, u->heads, heads, &layer);
        if (status == TT_OK) status = tt__mask_gradients(r, p, l, u->out_b, 1, NULL, &layer);
        if (status == TT_OK) status = tt__mask_gradients(r, p, l, u->down_w, u->neurons, neurons, &layer);
        if (status == TT_OK) status = tt__mask_gradients(r, p, l, u->down_b, 1, NULL, &layer);
        r->x->layer[l] += fabs(layer);
    }
    return status;
}

/* Sets the dropout rates of a config, which are its fields of kind 'p', to 0. */
static void tt__without_dropout(const tt__architecture *a, void *config)
{
    for (int k = 0; k < a->n_config; k++)
        if (a->config[k].kind == 'p') memset((char *)config + a->config[k].offset, 0, sizeof(float));
}

/* Returns parameter `which`, 0 to 3, of those whose gradients give the importance of layer l; NULL: the model
   has none. */
static tt_param *tt__importance_param(const tt__units *u, int l, int which)
{
    const size_t needed[] = {u->out_w, u->out_b, u->down_w, u->down_b};
    const char *of = (const char *)tt__pointer_at(u->self, u->a->layers_at);
    return (tt_param *)tt__pointer_at(of + (size_t)l * u->a->layer_bytes, needed[which]);
}

/* Freezes the first n parameters of the context except those whose gradients give the importance, and keeps
   the former states in `frozen`, (n). */
static void tt__importance_freeze(const tt__units *u, bool *frozen, int n)
{
    tt_param *p;
    for (int k = 0; k < n; k++) {
        frozen[k] = u->ctx->params[k]->frozen;
        u->ctx->params[k]->frozen = true;
    }
    for (int k = 0; k < 4 * u->layers; k++)
        if ((p = tt__importance_param(u, k / 4, k % 4)) != NULL) p->frozen = false;
}

/* Fails if a weight whose gradient gives the importance cannot have a gradient. */
static tt_status tt__importance_check(const tt__units *u)
{
    for (int k = 0; k < 4 * u->layers; k++) {
        const tt_param *p = tt__importance_param(u, k / 4, k % 4);
        if (p && (tt__is_coded(p->form) || p->low_a))
            return tt__fail(u->ctx, TT_ERR_ARGUMENT, "importance needs the gradient of parameter '%s', which "
                            "%s: measure importance, and prune, before %s", p->name,
                            p->low_a ? "has low-rank factors" : "is stored in few bits",
                            p->low_a ? "it gets them" : "it is stored");
    }
    return TT_OK;
}

static tt_importance *tt__importance_new(const tt__units *u)
{
    tt_importance *x = (tt_importance *)tt__calloc(u->ctx, sizeof *x);
    if (!x) return NULL;
    x->ctx = u->ctx;
    x->layers = u->layers;
    x->heads = u->heads;
    x->neurons = u->neurons;
    x->layer = (double *)tt__calloc(u->ctx, sizeof(double) * (size_t)u->layers);
    x->head = (double *)tt__calloc(u->ctx, sizeof(double) * (size_t)u->layers * (size_t)u->heads);
    x->neuron = (double *)tt__calloc(u->ctx, sizeof(double) * (size_t)u->layers * (size_t)u->neurons);
    if (x->layer && x->head && x->neuron) return x;
    tt_importance_free(x);
    return NULL;
}

/* Runs `steps` steps of a source whose updates change nothing, because the learning rate is 0. */
static tt_status tt__importance_steps(tt_trainer *t, const tt_source *source, int64_t steps)
{
    tt_status status = source->seek(source->self, 0, 0);
    bool more = true, updated;
    for (int64_t k = 0; k < steps && more && status == TT_OK; k += updated) {
        tt_batch b;
        memset(&b, 0, sizeof b);
        updated = false;
        status = source->next(source->self, &b, &more);
        if (status == TT_OK && more) status = tt_train_batch(t, &b, NULL, &updated);
    }
    return status == TT_OK ? tt_trainer_wait(t, NULL) : status;
}

/* Computes the importance of a model's units. u->self is a copy of the model, whose config this function
   changes. model: the copy as a trainer sees it. */
static tt_importance *tt__measure_units(const tt__units *u, const tt_model *model, const tt_source *source,
                                     int64_t steps, const tt_train_options *options)
{
    tt_context *ctx = u->ctx;
    tt_train_options o = options ? *options : tt_train_options_default();
    tt__importance_run r;
    memset(&r, 0, sizeof r);
    if (ctx->net || steps < 1) {
        tt__fail(ctx, TT_ERR_ARGUMENT, ctx->net ? "importance is for one process: measure it in one process, "
                 "and load the pruned model in all" : "importance needs at least one step");
        return NULL;
    }
    if (tt__importance_check(u) != TT_OK) return NULL;
    const int params = ctx->n_params;
    const char *layer = (const char *)tt__pointer_at(u->self, u->a->layers_at);
    const tt_param *out = (const tt_param *)tt__pointer_at(layer, u->out_w);
    const tt_param *down = (const tt_param *)tt__pointer_at(layer, u->down_w);
    const size_t largest = (size_t)tt__max(out->size, down->size);
    const size_t units = (size_t)tt__max(u->heads, u->neurons);
    tt__without_dropout(u->a, (char *)u->self + u->a->config_at);
    r.u = u;
    r.x = tt__importance_new(u);
    r.w = (float *)tt__alloc(ctx, sizeof *r.w * largest);
    r.dw = (float *)tt__alloc(ctx, sizeof *r.dw * largest);
    r.sum = (double *)tt__alloc(ctx, sizeof *r.sum * units);
    bool *frozen = (bool *)tt__alloc(ctx, sizeof *frozen * (size_t)params);
    tt_status status = r.x && r.w && r.dw && r.sum && frozen ? TT_OK : TT_ERR_MEMORY;
    o.compile.train = true;
    o.compile.update = NULL;
    o.compile.before_update = tt__importance_step;
    o.compile.user = &r;
    o.compile.optimizer = tt_optimizer_options_default();
    o.compile.optimizer.kind = TT_SGD;
    o.compile.optimizer.weight_decay = 0;
    memset(&o.schedule, 0, sizeof o.schedule);
    o.schedule.kind = TT_CONSTANT;
    o.features_once = false;
    o.teacher = NULL;
    o.teacher_model = NULL;
    o.hidden_weight = 0;
    tt_train_options_make_room(&o, source, NULL);
    if (status == TT_OK) {
        tt__importance_freeze(u, frozen, params);
        tt_trainer *t = tt_trainer_new(ctx, model, &o);
        status = t ? tt__importance_steps(t, source, steps) : ctx->status;
        tt_trainer_free(t);
        for (int k = 0; k < params; k++) ctx->params[k]->frozen = frozen[k];
    }
    for (int64_t k = 0; k < (int64_t)u->layers && status == TT_OK; k++)
        if (!isfinite(r.x->layer[k]))
            status = tt__fail(ctx, TT_ERR_NUMERIC, "the importance of layer %lld is not finite: the model's "
                              "loss or gradient is not finite", (long long)k);
    void *const owned[] = {r.w, r.dw, r.sum, frozen};
    tt__free_all(ctx, owned, TT__COUNT(owned));
    if (status == TT_OK) return r.x;
    tt_importance_free(r.x);
    return NULL;
}

tt_importance *tt_bert_importance(const tt_bert *m, const tt_source *source, int64_t steps,
                                  const tt_train_options *o)
{
    tt_bert copy = *m;
    const tt__units u = tt__bert_units(&copy);
    const tt_model model = tt_bert_model(&copy);
    return tt__measure_units(&u, &model, source, steps, o);
}

tt_importance *tt_vit_importance(const tt_vit *m, const tt_source *source, int64_t steps,
                                 const tt_train_options *o)
{
    tt_vit copy = *m;
    const tt__units u = tt__vit_units(&copy);
    const tt_model model = tt_vit_classifier(&copy);
    return tt__measure_units(&u, &model, source, steps, o);
}

tt_importance *tt_lm_importance(const tt_lm *m, const tt_source *source, int64_t steps,
                                const tt_train_options *o)
{
    tt_lm copy = *m;
    const tt__units u = tt__lm_units(&copy);
    const tt_model model = tt_lm_model(&copy);
    return tt__measure_units(&u, &model, source, steps, o);
}
