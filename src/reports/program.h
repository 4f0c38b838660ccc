#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"
#include "../context/memory.h"
#include "../compile/program.h"

/* --------------------------------------------------------------------------------------- programs as text */

/* Prints the text of a program without a pipeline, or of one stage. */
static void tt__print_program(const tt_program *p, tt__text_buffer *to)
{
    const tt_tape *t = p->built.t;
    tt__text_buffer text = *to;
    char what[256];
    for (int k = 0; k < t->n_code; k++) {
        const tt__instr *i = &t->code[k];
        char op[48];
        snprintf(op, sizeof op, "%s%s", tt__instr_name(i), i->on_host ? " on the host" : "");
        tt__print(&text, "%4d %-24s", k, op);
        for (int j = 0; j < TT__MAX_OUT; j++) {
            const tt__tape_value *x = &t->values[t->values[i->out[j]].base];
            const tt_param *param = x->storage == TT__PARAMETER ? p->ctx->params[x->param] : NULL;
            const tt__arena *own = p->arena;
            const tt__arena *a = param ? tt__placement_arena(own->kind, p->arena, param, own->stage, own->stages)
                                       : NULL;
            if (!i->out[j]) continue;
            tt__print(&text, " %s%s @%zu", tt__describe(t, i->out[j], what, sizeof what), i->add >> j & 1 ?
                      " +=" : "", a ? tt__placement_in(a, x->param)->offset : x->place);
        }
        tt__print(&text, " <-");
        for (int j = 0; j < TT__MAX_IN; j++)
            if (i->in[j]) tt__print(&text, " '%s'", t->values[i->in[j]].name);
        tt__print(&text, "%s\n", i->with_next ? " ..." : "");
    }
    *to = text;
}

size_t tt_program_text(const tt_program *p, char *to, size_t capacity)
{
    tt__text_buffer text = {to, capacity, 0};
    if (capacity) to[0] = 0;
    for (int s = 0; s < p->stages; s++) {
        if (p->stages > 1) tt__print(&text, "stage %d\n", s);
        tt__print_program(p->stage[s], &text);
    }
    return text.length;
}
