#pragma once
#include "../base/base.h"
#include "../reports/picture.h"
#include "progress.h"

/* ---- draws loss.svg: panels of the loss, the metric and the learning rate over the steps ---- */

enum { TT__FIT_LEFT = 72, TT__FIT_WIDTH = 690 }; /* pixels: left margin, for labels; width of a panel */

/* A vertical axis of values or of their decimal logarithms, with ticks at (first + k) * step, k from 0 on */
typedef struct tt__fit_axis {
    bool logarithmic;
    double from, to, step, first;
    int height; /* pixels */
} tt__fit_axis;

/* A line through the values of training or of validation or, if decay > 0, through their running mean. */
typedef struct tt__fit_series {
    tt__fit_value value;
    bool validation;
    double decay, sum, weight;
} tt__fit_series;

/* Sets *value to the series' value at point k. Returns false if the series has no value there. */
static bool tt__fit_at(const tt__fit_run *f, tt__fit_series *s, int k, double *value)
{
    const tt__fit_point *p = &f->point[k];
    if (p->validation != s->validation || isnan(p->value[s->value])) return false;
    s->sum = s->decay * s->sum + p->value[s->value];
    s->weight = s->decay * s->weight + 1;
    *value = s->sum / s->weight;
    return true;
}

/* Returns an axis for values from low to high. The axis starts at 0, unless low and high are close. If low
   and high are far apart and may_be_logarithmic is true, the axis is logarithmic. */
static tt__fit_axis tt__fit_axis_of(double low, double high, bool may_be_logarithmic, int height)
{
    tt__fit_axis a = {may_be_logarithmic && low > 0 && high > 1000 * low, 0, 0, 0, 0, height};
    if (a.logarithmic) {
        low = log10(low);
        high = log10(high);
    } else {
        bool narrow = high - low < 0.25 * high && high - low > 1e-4 * high;
        if (low > 0 && !narrow) low = 0;
        if (!(high > low)) high = low + 1;
    }
    a.step = tt__axis_step(high - low, height / 24);
    if (a.logarithmic && a.step < 1) a.step = 1;
    a.first = floor(low / a.step + 1e-6);
    a.from = a.first * a.step;
    a.to = ceil(high / a.step - 1e-6) * a.step;
    return a;
}

/* Returns the height of a value above the start of the axis, in tenths of a pixel. A value off the axis gets
   a height outside of the panel, where the picture is clipped, but at most a panel's height away. */
static int tt__fit_y(const tt__fit_axis *a, double value)
{
    double y = a->logarithmic ? (value > 0 ? log10(value) : a->from) : value;
    y = (y - a->from) / (a->to - a->from);
    return (int)floor(10 * a->height * fmin(fmax(y, -1), 2) + 0.5);
}

static int tt__fit_x(int64_t step, int64_t last)
{
    return (int)((double)(10 * TT__FIT_WIDTH) * ((double)step / (double)last) + 0.5);
}

/* Draws a series as a line, or as a dot if it has one point. Draws only the lowest and the highest point of
   each pixel column, which keeps the file small for any number of steps. */
static void tt__fit_line_of(tt__text_buffer *svg, const tt__fit_run *f, tt__fit_series s,
                            const tt__fit_axis *a, int64_t last, const char *colour, int width)
{
    int x = -1, low = 0, high = 0, before = 0;
    bool begun = false;
    double value;
    tt__print(svg, "<path clip-path='url(#p%d)' stroke='%s' stroke-width='%d' d='", (int)s.value, colour,
              width);
    for (int k = 0; k <= f->points; k++) {
        const bool end = k == f->points;
        if (!end && !tt__fit_at(f, &s, k, &value)) continue;
        const int at = end ? -1 : tt__fit_x(f->point[k].step, last), y = end ? 0 : tt__fit_y(a, value);
        if (x >= 0 && at / 10 == x / 10 && !end) {
            low = y < low ? y : low;
            high = y > high ? y : high;
            continue;
        }
        if (x >= 0) {
            bool rises = abs(before - low) <= abs(before - high);
            tt__print(svg, begun ? "L%d %d" : "M%d %dh0", x, rises ? low : high);
            if (low != high) tt__print(svg, "L%d %d", x, rises ? high : low);
            before = rises ? high : low;
            begun = true;
        }
        x = at;
        low = high = y;
    }
    tt__print(svg, "'/>\n");
}

/* Draws dots at the values of validation, at least 12 pixels apart. */
static void tt__fit_dots(tt__text_buffer *svg, const tt__fit_run *f, tt__fit_series s, const tt__fit_axis *a,
                         int64_t last)
{
    int x = -120;
    double y;
    tt__print(svg, "<path stroke='#d62728' stroke-width='65' d='");
    for (int k = 0; k < f->points; k++) {
        if (!tt__fit_at(f, &s, k, &y) || tt__fit_x(f->point[k].step, last) - x < 120) continue;
        x = tt__fit_x(f->point[k].step, last);
        tt__print(svg, "M%d %dh0", x, tt__fit_y(a, y));
    }
    tt__print(svg, "'/>\n");
}

enum { TT__FIT_EPOCHS = 16 };

/* Chooses the epochs whose ends get a mark and a number: epochs with round numbers, at least 25 pixels apart.
   Sets x[] to the places of the marks, in tenths of a pixel, and number[] to the epochs' numbers. Returns the
   number of marks. */
static int tt__fit_epochs(const tt__fit_run *f, int64_t last, int x[TT__FIT_EPOCHS],
                          int64_t number[TT__FIT_EPOCHS])
{
    int n = 0;
    int64_t epochs = f->points ? f->point[f->points - 1].epoch : 1;
    int64_t every = tt__max(1, (int64_t)tt__axis_step((double)epochs, 12));
    for (int k = 0; k < f->points && n < TT__FIT_EPOCHS; k++) {
        bool over = k + 1 < f->points ? f->point[k + 1].epoch > f->point[k].epoch : f->p.step == 0;
        int at = tt__fit_x(f->point[k].step, last);
        if (!over || f->point[k].epoch % every != 0 || at - (n ? x[n - 1] : -TT__FIT_LEFT) < 250) continue;
        x[n] = at;
        number[n++] = f->point[k].epoch;
    }
    return n;
}

static void tt__fit_panel(tt__text_buffer *svg, const tt__fit_run *f, tt__fit_value value, int top,
                          int height, int64_t last)
{
    char metric[32];
    const char *title = value == TT__FIT_LOSS ? "Loss" : value == TT__FIT_LR ? "Learning rate" : metric;
    snprintf(metric, sizeof metric, "%s", f->metric.name ? f->metric.name : "");
    if (metric[0] >= 'a' && metric[0] <= 'z') metric[0] = (char)(metric[0] - 'a' + 'A');
    const bool has_validation = value != TT__FIT_LR;
    const tt__fit_series each = {value, false, 0, 0, 0}, validation = {value, true, 0, 0, 0};
    const tt__fit_series mean = {value, false, has_validation ? exp(-50 / fmax(f->points, 50)) : 0, 0, 0};
    const int64_t x_step = tt__max(1, (int64_t)tt__axis_step((double)last, 8));
    double low = INFINITY, high = -INFINITY, highest = -INFINITY, y;
    int ends[TT__FIT_EPOCHS], epochs, steps = 0;
    int64_t number[TT__FIT_EPOCHS];
    char label[32];
    for (int side = 0; side <= (int)has_validation; side++) {
        tt__fit_series s = side ? validation : mean;
        for (int k = 0; k < f->points; k++) {
            if (!tt__fit_at(f, &s, k, &y)) continue;
            low = fmin(low, y);
            high = fmax(high, y);
            if (side) continue;
            highest = fmax(highest, f->point[k].value[value]);
            steps++;
        }
    }
    if (value == TT__FIT_LOSS)
        high = fmax(high, fmin(highest, 1.5 * high)); /* steps far above the mean are cut off */
    if (!(low <= high)) low = 0, high = 1;
    const tt__fit_axis a = tt__fit_axis_of(low, high, value == TT__FIT_LOSS, height);
    tt__print(svg, "<text x='%d' y='%d' font-weight='bold'>%s%s</text>\n<g text-anchor='end' fill='#555'>",
              TT__FIT_LEFT, top - 10, title, a.logarithmic ? " (logarithmic)" : "");
    const int ticks = (int)fmin((a.to - a.from) / a.step + 1.5, 40);
    for (int k = 0; k < ticks; k++) {
        const double tick = (a.first + k) * a.step, at = a.logarithmic ? pow(10, tick) : tick;
        const int up = (int)(height * (tick - a.from) / (a.to - a.from) + 0.5);
        if (fabs(at) > FLT_MAX) continue;
        tt__print(svg, "<text x='%d' y='%d'>%s</text>", TT__FIT_LEFT - 8, top + 4 + height - up,
                  tt__shortest((float)at, label));
    }
    /* From here on, coordinates are tenths of a pixel, to the right and up from the panel's lower left
       corner. */
    tt__print(svg,
              "</g>\n<clipPath id='p%d'><rect x='-30' y='-30' width='%d' height='%d'/></clipPath>\n"
              "<g transform='translate(%d %d) scale(.1 -.1)' fill='none' stroke-width='10' "
              "stroke-linecap='round' stroke-linejoin='round'>\n<path stroke='#e4e4e4' d='",
              (int)value, 10 * TT__FIT_WIDTH + 60, 10 * height + 60, TT__FIT_LEFT, top + height);
    for (int k = 1; k < ticks; k++) {
        const double tick = (a.first + k) * a.step;
        tt__print(svg, "M0 %dh%d", tt__fit_y(&a, a.logarithmic ? pow(10, tick) : tick), 10 * TT__FIT_WIDTH);
    }
    for (int64_t k = 1; k <= last / x_step; k++)
        tt__print(svg, "M%d 0v%d", tt__fit_x(k * x_step, last), 10 * height);
    tt__print(svg, "'/>\n<path stroke='#aaa' stroke-dasharray='20 40' d='");
    epochs = tt__fit_epochs(f, last, ends, number);
    for (int k = 0; k < epochs; k++) tt__print(svg, "M%d 0v%d", ends[k], 10 * height);
    tt__print(svg, "'/>\n<path stroke='#555' d='M0 %dV0H%d'/>\n", 10 * height, 10 * TT__FIT_WIDTH);
    if (value == TT__FIT_LOSS) tt__fit_line_of(svg, f, each, &a, last, "#aec7e8", 8);
    tt__fit_line_of(svg, f, mean, &a, last, "#1f77b4", steps == 1 ? 50 : 18);
    if (has_validation) tt__fit_line_of(svg, f, validation, &a, last, "#d62728", 14);
    if (has_validation) tt__fit_dots(svg, f, validation, &a, last);
    tt__print(svg, "</g>\n");
}

/* Draws loss.svg. The file has at most about 100 KB, for any number of steps. */
static void tt__fit_draw(tt__text_buffer *svg, const void *arg)
{
    /* In pixels. LOSS, METRIC: tops of the panels of the loss and of the metric; PANEL: height of the
       metric's panel. */
    enum { LOSS = 40, METRIC = 316, PANEL = 168 };
    enum { LEFT = TT__FIT_LEFT, RIGHT = LEFT + TT__FIT_WIDTH };
    const tt__fit_run *f = (const tt__fit_run *)arg;
    const int LR = METRIC + (f->metric.name ? PANEL : 0), BOTTOM = LR + 72, HEIGHT = BOTTOM + 56;
    int x[TT__FIT_EPOCHS];
    int64_t last = 1, number[TT__FIT_EPOCHS];
    for (int k = 0; k < f->points; k++) last = tt__max(last, f->point[k].step);
    const int64_t x_step = tt__max(1, (int64_t)tt__axis_step((double)last, 8));
    tt__print(svg, "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 800 %d' width='800' height='%d' "
              "font-family='Helvetica,Arial,sans-serif' font-size='12' fill='#222'>\n<rect x='.5' y='.5' "
              "width='799' height='%d' rx='6' fill='#fff' stroke='#ccc'/>\n", HEIGHT, HEIGHT, HEIGHT - 1);
    tt__print(svg, "<path stroke='#aec7e8' stroke-width='2' d='M%d 26h22'/><text x='%d' y='30'>training, "
              "each step</text><path stroke='#1f77b4' stroke-width='2' d='M%d 26h22'/><text x='%d' "
              "y='30'>training, running mean</text><path stroke='#d62728' stroke-width='2' d='M%d "
              "26h22'/><circle cx='%d' cy='26' r='3.5' fill='#d62728'/><text x='%d' "
              "y='30'>validation</text>\n", RIGHT - 418, RIGHT - 390, RIGHT - 264, RIGHT - 236, RIGHT - 86,
              RIGHT - 75, RIGHT - 58);
    tt__fit_panel(svg, f, TT__FIT_LOSS, LOSS, 232, last);
    if (f->metric.name) tt__fit_panel(svg, f, TT__FIT_METRIC, METRIC, 124, last);
    tt__fit_panel(svg, f, TT__FIT_LR, LR, BOTTOM - LR, last);
    tt__print(svg, "<g text-anchor='middle' fill='#555'>");
    for (int64_t k = 0; k <= last / x_step; k++)
        tt__print(svg, "<text x='%d' y='%d'>%lld</text>", LEFT + tt__fit_x(k * x_step, last) / 10,
                  BOTTOM + 18, (long long)(k * x_step));
    for (int k = 0, n = tt__fit_epochs(f, last, x, number); k < n; k++)
        tt__print(svg, "<text x='%d' y='%d'>%lld</text>", LEFT + x[k] / 10, BOTTOM + 38,
                  (long long)number[k]);
    tt__print(svg, "</g>\n<g text-anchor='end'><text x='%d' y='%d'>step</text><text x='%d' "
              "y='%d'>epoch</text></g>\n</svg>\n", LEFT - 22, BOTTOM + 18, LEFT - 22, BOTTOM + 38);
}
