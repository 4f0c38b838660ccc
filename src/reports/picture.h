#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../passes/overlap.h"
#include "../compile/program.h"
#include "plan.h"
#include "text.h"

/* ----------------------------------------------------------------------------------------- picture of a plan
   tt_plan_svg draws the bytes in use at each instruction, by category. */

/* Returns the distance between the marks of a plot's axis: the smallest of 1, 2 or 5 times a power of ten
   with which an axis of `length` has at most `marks` marks. */
static double tt__axis_step(double length, int marks)
{
    static const int times[] = {1, 2, 5};
    const double step = pow(10, floor(log10(length / marks)));
    for (int k = 0; k < TT__COUNT(times); k++) if (length <= times[k] * step * marks) return times[k] * step;
    return 10 * step;
}

static void tt__print_xml(tt__text_buffer *text, const char *name)
{
    for (; *name; name++) {
        if (*name == '&') tt__print(text, "&amp;");
        else if (*name == '<') tt__print(text, "&lt;");
        else tt__print(text, "%c", *name >= ' ' && *name <= '~' ? *name : '?');
    }
}

/* The categories of memory, in the order of the plot's layers from below. tt__live_layers returns live[k * N
   + c]: for column k of the plot, the bytes in use of the categories tt__layer[0] to tt__layer[c] together. A
   column that stands for several of the n instructions shows the instruction with the most bytes. Returns
   NULL if memory runs out. */
static const tt_category tt__layer[] = {TT_MEM_PARAMETERS, TT_MEM_OPTIMIZER, TT_MEM_GRADIENTS, TT_MEM_INPUTS,
                                        TT_MEM_ACTIVATIONS, TT_MEM_WORKSPACE};
static int64_t *tt__live_layers(const tt_program *p, int n, int columns)
{
    enum { N = TT_MEM_CATEGORIES };
    int64_t *live = (int64_t *)tt__calloc(p->ctx, sizeof *live * (size_t)(n + 1) * N);
    tt_plan_value v;
    for (int k = 0; live && k < tt__storages(p); k++) {
        int c = 0;
        if (!tt__storage_of(p, k, &v)) continue;
        while (tt__layer[c] != v.category) c++;
        for (; c < N; c++) {
            live[v.first * N + c] += (int64_t)v.bytes;
            live[(v.last + 1) * N + c] -= (int64_t)v.bytes;
        }
    }
    for (int k = N; live && k < n * N; k++) live[k] += live[k - N];
    for (int k = 0; live && k < columns; k++) {
        int64_t max = (int64_t)k * n / columns;
        for (int64_t j = max + 1; j < (int64_t)(k + 1) * n / columns; j++)
            if (live[j * N + N - 1] > live[max * N + N - 1]) max = j;
        memmove(&live[k * N], &live[max * N], sizeof *live * N);
    }
    return live;
}

/* Corners and size of the plot, in pixels. */
enum { TT__LEFT = 64, TT__TOP = 66, TT__WIDTH = 600, TT__HEIGHT = 290, TT__RIGHT = TT__LEFT + TT__WIDTH,
       TT__BOTTOM = TT__TOP + TT__HEIGHT };

/* Prints a line of text. anchor: the point of the text that is at x: "start", "middle" or "end". */
TT_PRINTF(5, 6)
static void tt__label(tt__text_buffer *text, int x, int y, const char *anchor, const char *format, ...)
{
    char label[160];
    va_list args;
    va_start(args, format);
    vsnprintf(label, sizeof label, format, args);
    va_end(args);
    tt__print(text, "<text x='%d' y='%d' text-anchor='%s'>%s</text>\n", x, y, anchor, label);
}

/* Draws the layers of memory, the highest first and each down to the axis, so that lower layers cover higher
   ones. Coordinates are tenths of a pixel from the lower left corner. scale: tenths of a pixel per byte.
   drawn: gets, for each layer, whether the layer has any bytes. */
static void tt__draw_layers(tt__text_buffer *text, const int64_t *live, int columns, double scale,
                            const char *const *colour, bool *drawn)
{
    enum { N = TT_MEM_CATEGORIES };
    for (int c = N - 1; c >= 0; c--) {
        int height = 0, x = 0;
        drawn[c] = false;
        for (int k = c; k < columns * N && !drawn[c]; k += N) drawn[c] = live[k] > (c ? live[k - 1] : 0);
        if (!drawn[c]) continue;
        tt__print(text, "<path fill='%s' d='M0 0", colour[c]);
        for (int k = 0; k < columns; k++) {
            const int from = (int)(10 * (int64_t)TT__WIDTH * k / columns);
            const int h = (int)((double)live[k * N + c] * scale + 0.5);
            if (h == height) continue;
            if (from > x) tt__print(text, "h%d", from - x);
            tt__print(text, "v%d", h - height);
            x = from;
            height = h;
        }
        tt__print(text, "H%dV0z'><title>%s</title></path>\n", 10 * TT__WIDTH, tt_category_name(tt__layer[c]));
    }
}

/* Draws a band below the axis with the instructions of the forward, the backward and the update. */
static void tt__draw_parts(tt__text_buffer *text, const tt__instr *i, int instructions)
{
    static const char *const names[] = {"forward", "backward", "update"};
    for (int part = 0, from = 0, upto = 0; part < 3; part++, from = upto) {
        for (; upto < instructions; upto++)
            if ((i[upto].segment == TT__EACH_STEP ? 2 : i[upto].backward) > part) break;
        if (upto == from) continue;
        const int x = TT__LEFT + TT__WIDTH * from / instructions;
        const int width = TT__LEFT + TT__WIDTH * upto / instructions - x;
        tt__print(text, "<rect x='%d' y='%d' width='%d' height='17' fill='%s'/>", x, TT__BOTTOM + 1, width,
                  part == 1 ? "#dcdcdc" : "#ececec");
        if (width > 60) tt__label(text, x + width / 2, TT__BOTTOM + 14, "middle", "%s", names[part]);
    }
}

/* Returns whether i recomputes a value (kind 0), or moves data between memories or ranks (kind 1). */
static bool tt__is_marked(const tt_tape *t, const tt__instr *i, int kind)
{
    return kind ? tt__stream_beside(t, i) != TT__COMPUTE_STREAM : i->recomputed;
}

/* Draws a line below each instruction for which tt__is_marked returns true. Returns whether a line was
   drawn. */
static bool tt__draw_marks(tt__text_buffer *text, const tt_tape *t, int kind, const char *colour)
{
    bool any = false;
    for (int x = 0; x < TT__WIDTH;) {
        const int from = x;
        for (bool marked = true; marked && x < TT__WIDTH; x += marked) {
            const int first = (int)((int64_t)t->n_code * x / TT__WIDTH);
            marked = false;
            for (int k = first; k < t->n_code && (int64_t)k * TT__WIDTH < (int64_t)t->n_code * (x + 1); k++)
                marked = marked || tt__is_marked(t, &t->code[k], kind);
        }
        if (x == from) { x++; continue; }
        tt__print(text, any ? "M%d %dh%d" : "<path stroke-width='3' d='M%d %dh%d", TT__LEFT + from,
                  TT__BOTTOM + (kind ? 16 : 3), x - from);
        any = true;
    }
    if (any) tt__print(text, "' stroke='%s'/>\n", colour);
    return any;
}

size_t tt_plan_svg(const tt_program *all_stages, char *to, size_t capacity)
{
    const tt_program *p = tt__largest_stage(all_stages);
    enum { N = TT_MEM_CATEGORIES, LEGEND = TT__RIGHT + 24 };
    static const char *const colour[N] = {"#4e79a7", "#a0cbe8", "#f28e2b", "#b07aa1", "#59a14f", "#9c9490"};
    const tt_plan plan = tt_program_plan(p);
    const int n = (int)tt__max(1, plan.instructions), columns = (int)tt__min(n, TT__WIDTH);
    size_t peak = 0;
    for (int c = 0; c < N; c++) peak += plan.at_peak[c];
    const double max = (double)(peak > plan.bytes ? peak : plan.bytes) + 1, full = 1.2 * max;
    const double scale = 10 * TT__HEIGHT / full, unit = max < 1e9 ? 1e6 : 1e9;
    const double step = tt__axis_step(full / unit, 6);
    const char *unit_name = max < 1e9 ? "MB" : "GB";
    const int digits = max < 10 * unit ? 3 : max < 100 * unit ? 2 : 1; /* digits after the decimal point */
    int64_t *live = tt__live_layers(p, n, columns);
    bool drawn[N];
    tt__text_buffer text = {to, capacity, 0};
    if (capacity) to[0] = 0;
    if (!live) return 0;
    tt__print(&text, "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 880 %d' width='880' height='%d' "
              "font-family='Helvetica,Arial,sans-serif' font-size='12' fill='#222'>\n", TT__BOTTOM + 64,
              TT__BOTTOM + 64);
    tt__print(&text, "<rect x='.5' y='.5' width='879' height='%d' rx='6' fill='#fff' stroke='#ccc'/>\n"
              "<text x='%d' y='28' font-size='%d' font-weight='bold'>Memory of one %s on ", TT__BOTTOM + 63,
              TT__LEFT, plan.ranks > 1 ? 13 : 15, p->settings.options.train ? "training step" : "run");
    tt__print_ranks(p, &text);
    if (plan.pipeline > 1) tt__print(&text, ", stage %d</text>\n", p->arena->stage);
    else tt__print(&text, "%s</text>\n", plan.ranks == 1 ? "" :
              plan.bytes == plan.min_bytes ? ", every rank" : ", the server");
    tt__print(&text, "<g transform='translate(%d %d) scale(.1 -.1)' fill='none' stroke-width='10'>\n"
              "<path stroke='#e2e2e2' d='", TT__LEFT, TT__BOTTOM);
    for (int k = 1; k * step * unit < full; k++)
        tt__print(&text, "M0 %dh%d", (int)(k * step * unit * scale + 0.5), 10 * TT__WIDTH);
    tt__print(&text, "'/>\n");
    tt__draw_layers(&text, live, columns, scale, colour, drawn);
    tt__free(p->ctx, live);
    const int peak_x = (int)((plan.peak_instruction + 0.5) / n * (double)(10 * TT__WIDTH));
    const int peak_y = (int)((double)peak * scale + 0.5), arena_y = (int)((double)plan.bytes * scale + 0.5);
    tt__print(&text, "<path stroke='#222' stroke-dasharray='60 40' d='M0 %dH%d'/>\n<path stroke='#222' d='M0 "
              "%dV0H%dM%d %dV%d'/><circle cx='%d' cy='%d' r='35' fill='#222'/>\n</g>\n", arena_y,
              10 * TT__WIDTH, 10 * TT__HEIGHT, 10 * TT__WIDTH, peak_x, peak_y, 10 * TT__HEIGHT - 190, peak_x,
              peak_y);
    tt__draw_parts(&text, p->built.t->code, plan.instructions);
    const bool marks[] = {tt__draw_marks(&text, p->built.t, 0, "#e15759"),
                          tt__draw_marks(&text, p->built.t, 1, "#2f6f4f")};
    for (int k = 0; k * step * unit < full; k++) {
        const int up = (int)(k * step * unit * scale / 10 + 0.5);
        tt__label(&text, TT__LEFT - 6, TT__BOTTOM + 4 - up, "end", "%g", k * step);
    }
    for (int k = 0, each = (int)tt__max(1, (int64_t)tt__axis_step(n, 8)); k <= n; k += each)
        tt__label(&text, TT__LEFT + (int)((int64_t)TT__WIDTH * k / n), TT__BOTTOM + 33, "middle", "%d", k);
    tt__label(&text, TT__LEFT - 6, TT__TOP - 8, "end", "%s", unit_name);
    tt__label(&text, TT__LEFT + TT__WIDTH / 2, TT__BOTTOM + 52, "middle", "instruction");
    char moved[96] = "", host[96] = "";
    if (plan.ranks > 1)
        snprintf(moved, sizeof moved, "moved per step and rank %.*f %s (at least %.*f)", digits,
                 (double)plan.moved_bytes / unit, unit_name, digits, (double)plan.min_moved_bytes / unit);
    if (plan.transfer_bytes)
        snprintf(host, sizeof host, "%shost %.*f %s, %.*f %s copied per step", *moved ? "; " : "", digits,
                 (double)plan.host_bytes / unit, unit_name, digits, (double)plan.transfer_bytes / unit,
                 unit_name);
    if (*moved || *host) tt__label(&text, TT__RIGHT, 48, "end", "%s%s", moved, host);
    const int width = 7 * (24 + (int)strlen(plan.peak_name)); /* approximate width of the peak's label */
    const int64_t label_x = tt__min(TT__LEFT + (peak_x - 5 * width) / 10, 872 - width);
    tt__print(&text, "<text x='%d' y='%d'><tspan font-weight='bold'>peak %.*f %s</tspan> at %d: ",
              (int)tt__max(TT__LEFT + 8, label_x), TT__TOP + 13, digits, (double)peak / unit, unit_name,
              plan.peak_instruction);
    tt__print_xml(&text, plan.peak_name);
    tt__print(&text, "</text>\n");
    tt__label(&text, TT__RIGHT + 8, TT__BOTTOM + 4 - arena_y / 10, "start", "arena %.*f %s", digits,
              (double)plan.bytes / unit, unit_name);
    tt__label(&text, LEGEND, TT__TOP + 92, "start", "at the peak");
    for (int c = N - 1, y = TT__TOP + 100; c >= 0; c--) {
        if (!drawn[c]) continue;
        tt__print(&text, "<rect x='%d' y='%d' width='13' height='13' fill='%s'/>", LEGEND, y, colour[c]);
        tt__label(&text, LEGEND + 19, y + 11, "start", "%s", tt_category_name(tt__layer[c]));
        tt__label(&text, 864, y + 11, "end", "%.*f %s", digits, (double)plan.at_peak[tt__layer[c]] / unit,
                  unit_name);
        y += 22;
    }
    if (marks[0])
        tt__label(&text, LEGEND, TT__BOTTOM + 8, "start",
                  "<tspan fill='#e15759'>&#8212;</tspan> recomputed: %d values", plan.recomputed);
    if (marks[1])
        tt__label(&text, LEGEND, TT__BOTTOM + 24, "start", "<tspan fill='#2f6f4f'>&#8212;</tspan> moved%s%s",
                  plan.transfer_bytes ? " from or to the host" : "", plan.ranks == 1 ? "" :
                  plan.transfer_bytes ? " or ranks" : " between ranks");
    tt__print(&text, "</svg>\n");
    return text.length;
}
