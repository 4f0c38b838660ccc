#pragma once
#include "../base/base.h"
#include "../tape/tape.h"
#include "../tape/record.h"

/* ===========================================================================================================
   PLAN                                                                                              src/plan/
   Gives every value a place in memory. Lifetimes are exact: from the instruction that first writes a storage
   to the last that reads it. Persistent values are stored one after another. Other values are placed by
   greedy first fit and best fit in several orders (Pisarchyk, Lee: "Efficient memory management for deep
   neural net inference", 2020); the lowest placement is kept. The device's memory and the host's are placed
   separately. Uses tape.
   ======================================================================================================== */

#define TT__NO_PLACE SIZE_MAX /* place of a storage that no instruction uses */

/* A storage to be placed. The storage is in use from instruction `first` to instruction `last`, both
   included. */
typedef struct tt__box {
    int first, last;
    size_t bytes, place;
    int32_t value;  /* number of the storage; 0: the workspace of instruction `first` */
    int merged;     /* index of the box whose place this box takes over; its own index if it takes none */
    tt__space space;
} tt__box;

/* Returns the max over the instructions of the bytes of a space that are in use; *at receives the
   instruction. Counts only boxes (storages to be placed) of `min` bytes or more. SIZE_MAX: out of memory. */
static size_t tt__max_live(const tt__box *box, int n, int instructions, tt__space space, size_t min,
                           tt_context *ctx, int *at)
{
    int64_t *change = (int64_t *)tt__calloc(ctx, sizeof *change * ((size_t)instructions + 1));
    size_t live = 0, max = 0;
    if (!change) return SIZE_MAX;
    for (int k = 0; k < n; k++) {
        if (box[k].merged != k || box[k].space != space || box[k].bytes < min) continue;
        change[box[k].first] += (int64_t)box[k].bytes;
        change[box[k].last + 1] -= (int64_t)box[k].bytes;
    }
    *at = 0;
    for (int k = 0; k <= instructions; k++) {
        live = (size_t)((int64_t)live + change[k]);
        if (live > max) { max = live; *at = k; }
    }
    tt__free(ctx, change);
    return max;
}

/* The bytes in use at each instruction, as a binary tree over the instructions (a segment tree: Bentley,
   "Solutions to Klee's rectangle problems", 1977). A node has two lists of spans of bytes: spans in use
   during all instructions of the node, and spans in use during some of them. */
typedef struct tt__interval {
    size_t from, to;
    int next;       /* next span of the list, which is ordered by `from`; 0: none */
    int jump;       /* a later span, as a shortcut for searches; valid only while it is in the same list */
    int list;       /* number of the list that has the span; 0: none */
} tt__interval;
typedef struct tt__taken {
    tt_context *ctx;
    tt__interval *span; int n_span, cap_span;   /* element 0 means "none" */
    int unused;     /* first span that is in no list; 0: none */
    int *list;      /* list[2 * k]: first span in use during all instructions of node k; list[2 * k + 1]:
                       first span in use during some instructions of node k */
    int *hint;      /* for each list: the span changed last */
    int leaves;     /* number of instructions, rounded up to a power of two; the root is node 1 */
    int highest;    /* the box with the highest end; of several, the box placed last */
} tt__taken;

static bool tt__taken_open(tt_context *ctx, tt__taken *t, int instructions)
{
    memset(t, 0, sizeof *t);
    t->ctx = ctx;
    for (t->leaves = 1; t->leaves < instructions; t->leaves *= 2) {}
    t->list = (int *)tt__alloc(ctx, sizeof *t->list * 8 * (size_t)t->leaves);
    t->hint = t->list ? t->list + 4 * t->leaves : NULL;
    return t->list != NULL;
}

static void tt__taken_close(tt__taken *t)
{
    tt__free(t->ctx, t->span);
    tt__free(t->ctx, t->list);
}

static bool tt__taken_clear(tt__taken *t)
{
    memset(t->list, 0, sizeof *t->list * 8 * (size_t)t->leaves);
    t->n_span = t->unused = 0;
    if (!TT__GROW(t->ctx, t->span, t->n_span, t->cap_span)) return false;
    t->span[0].list = 0;
    t->n_span = 1;
    return true;
}

/* Returns the last span (range of bytes in use) of a list that ends at or below `limit`. The search begins at
   span `at`, which ends at or below `limit`, too. Leaves shortcuts for later searches. */
static int tt__span_before(tt__taken *t, int at, size_t limit)
{
    for (int two_back = at, back = at;;) {
        const tt__interval *s = &t->span[at], *jump = &t->span[s->jump];
        const bool leads = jump->list == s->list && jump->from > s->from && jump->to <= limit;
        const int next = leads ? s->jump : s->next;
        if (!next || t->span[next].to > limit) return at;
        t->span[two_back].jump = next;
        two_back = back;
        back = at = next;
    }
}

/* Adds bytes [from, to) to a list of the bytes in use, and joins them with the spans (ranges of bytes) that
   they overlap or touch. Returns false if out of memory. */
static bool tt__span_add(tt__taken *t, int list, size_t from, size_t to)
{
    int before = 0, at = t->list[list], hint = t->hint[list];
    /* Most additions to a list are near the previous addition. */
    if (t->span[hint].list == list && t->span[hint].from <= from) at = hint;
    if (at && t->span[at].to < from) {
        before = tt__span_before(t, at, from - 1);
        at = t->span[before].next;
    }
    if (at && t->span[at].from <= to) { /* span `at` grows and absorbs the spans that it now touches */
        tt__interval *s = &t->span[at];
        t->hint[list] = at;
        if (from < s->from) s->from = from;
        if (to <= s->to) return true;
        s->to = to;
        for (int next; (next = s->next) != 0 && t->span[next].from <= s->to;) {
            if (t->span[next].to > s->to) s->to = t->span[next].to;
            s->next = t->span[next].next;
            t->span[next].next = t->unused;
            t->span[next].list = 0;
            t->unused = next;
        }
        return true;
    }
    int made = t->unused;
    if (made) t->unused = t->span[made].next;
    else if (!TT__GROW(t->ctx, t->span, t->n_span, t->cap_span)) return false;
    else made = t->n_span++;
    t->span[made].from = from;
    t->span[made].to = to;
    t->span[made].next = t->span[made].jump = at;
    t->span[made].list = list;
    t->hint[list] = made;
    *(before ? &t->span[before].next : &t->list[list]) = made;
    return true;
}

/* Marks the place of box b as in use, in the part of the tree below `node`, which covers instructions
   [lo, lo + width). Returns false if out of memory. */
static bool tt__take(tt__taken *t, const tt__box *b, int node, int lo, int width)
{
    if (b->first >= lo + width || b->last < lo) return true;
    bool always = b->first <= lo && b->last >= lo + width - 1;
    if (!tt__span_add(t, 2 * node + !always, b->place, b->place + b->bytes)) return false;
    return always || (tt__take(t, b, 2 * node, lo, width / 2) &&
                      tt__take(t, b, 2 * node + 1, lo + width / 2, width / 2));
}

/* Appends to `heads` the first span of each list of bytes that are in use during box b's life. Looks in the
   part of the tree below `node`, which covers instructions [lo, lo + width). Returns the new number n of
   lists. */
enum { TT__TAKEN_LISTS = 6 * 32 };
static int tt__taken_lists(const tt__taken *t, const tt__box *b, int node, int lo, int width, int *heads,
                           int n)
{
    const int at_times = t->list[2 * node + 1];
    if (b->first >= lo + width || b->last < lo) return n;
    bool always = b->first <= lo && b->last >= lo + width - 1;
    if (t->list[2 * node]) heads[n++] = t->list[2 * node];
    if (always && at_times) heads[n++] = at_times;
    if (always || !at_times) return n;
    n = tt__taken_lists(t, b, 2 * node, lo, width / 2, heads, n);
    return tt__taken_lists(t, b, 2 * node + 1, lo + width / 2, width / 2, heads, n);
}

/* Returns the place of the lowest gap or, with `tightest`, the smallest gap that has room for b. Gaps are
   between the bytes that are in use during b's life. */
static size_t tt__gap(tt__taken *t, const tt__box *b, bool tightest)
{
    int head[TT__TAKEN_LISTS], n = tt__taken_lists(t, b, 1, 0, t->leaves, head, 0);
    size_t cursor = 0, best = SIZE_MAX, best_gap = SIZE_MAX;
    for (;;) {
        size_t next = SIZE_MAX; /* the first byte in use above `cursor` */
        bool moved = false;
        for (int k = 0; k < n;) {
            if (t->span[head[k]].to <= cursor) head[k] = t->span[tt__span_before(t, head[k], cursor)].next;
            const tt__interval *s = &t->span[head[k]];
            if (!head[k]) { head[k] = head[--n]; continue; }
            if (s->from <= cursor) { cursor = s->to; moved = true; }
            else if (s->from < next) next = s->from;
            k++;
        }
        if (moved) continue;
        if (next == SIZE_MAX) return best == SIZE_MAX ? cursor : best;
        if (next - cursor >= b->bytes && next - cursor < best_gap) {
            best = cursor;
            best_gap = next - cursor;
            if (!tightest) return best;
        }
        cursor = next;
    }
}

/* Places boxes (storages) in the given order. Each box goes into a gap between the boxes that are placed
   already and alive at the same time: into the lowest gap with room or, with `tightest`, the smallest.
   Returns the height, at which the highest box ends; stops as soon as the height exceeds `limit`. SIZE_MAX:
   out of memory. */
static size_t tt__place_in_order(tt__box *box, const int *order, int n, bool tightest, size_t limit,
                                 tt__taken *taken)
{
    size_t height = 0;
    if (!tt__taken_clear(taken)) return SIZE_MAX;
    for (int k = 0; k < n; k++) {
        tt__box *b = &box[order[k]];
        b->place = tt__gap(taken, b, tightest);
        if (b->place + b->bytes >= height) {
            height = b->place + b->bytes;
            taken->highest = order[k];
        }
        if (height > limit) return height;
        if (!tt__take(taken, b, 1, 0, taken->leaves)) return SIZE_MAX;
    }
    return height;
}

/* Number of keys by which boxes (storages) are sorted before they are placed. Key 0: size; 1: size x
   duration; 2: duration; 3: first instruction; 4: the boxes in use at the peak by duration, then the others
   by size. The box with the larger key comes first; with key 3, the box that begins earlier. Boxes with equal
   keys are ordered by size, the larger first, then by index. */
#define TT__ORDERS 5
static double tt__box_key(const tt__box *b, int kind, int peak)
{
    double duration = b->last - b->first + 1, bytes = (double)b->bytes;
    if (kind == 4) return b->first <= peak && peak <= b->last ? 0x1p50 + duration : bytes;
    return kind == 0 ? bytes : kind == 1 ? bytes * duration : kind == 2 ? duration : -(double)b->first;
}

static bool tt__box_before(const tt__box *box, int a, int b, int kind, int peak)
{
    double x = tt__box_key(&box[a], kind, peak), y = tt__box_key(&box[b], kind, peak);
    if (x != y) return x > y;
    if (box[a].bytes != box[b].bytes) return box[a].bytes > box[b].bytes;
    return a < b;
}

/* Sorts the n box numbers in `order` by key `kind`, by merge sort. */
static void tt__sort_boxes(const tt__box *box, int *order, int *scratch, int n, int kind, int peak)
{
    for (int width = 1; width < n; width *= 2) {
        for (int lo = 0; lo < n; lo += 2 * width) {
            int mid = (int)tt__min(lo + width, n), hi = (int)tt__min(lo + 2 * width, n), a = lo, b = mid;
            for (int k = lo; k < hi; k++) {
                bool left = b >= hi || (a < mid && !tt__box_before(box, order[b], order[a], kind, peak));
                scratch[k] = left ? order[a++] : order[b++];
            }
        }
        memcpy(order, scratch, sizeof *order * (size_t)n);
    }
}

enum { TT__FEW_BOXES = 800, TT__IMPROVE = 200000, TT__IMPROVE_HOST = 20000, TT__IMPROVE_MANY = 8 };

/* Searches for an order whose placement is lower: moves the box that ends highest to the front of the order,
   places all boxes anew, and repeats. The number of attempts falls with the number of boxes, and is smaller
   for the host's memory, which is less scarce. With TT__FEW_BOXES boxes or more, there are TT__IMPROVE_MANY
   attempts if the height exceeds the bound by more than 1/64, and otherwise none. Leaves the lowest placement
   found, and returns its height. */
static size_t tt__improve(tt__box *box, int *order, int *best_order, int n, bool tightest, size_t bound,
                          tt__taken *taken)
{
    size_t best = tt__place_in_order(box, order, n, tightest, SIZE_MAX, taken), height = best;
    bool best_tightest = tightest;
    const int max = n && box[order[0]].space == TT__HOST ? TT__IMPROVE_HOST : TT__IMPROVE;
    int rounds = n < TT__FEW_BOXES && best > bound ? max / (n + 1) : 0;
    if (n >= TT__FEW_BOXES && best > bound + bound / 64) rounds = TT__IMPROVE_MANY;
    memcpy(best_order, order, sizeof *order * (size_t)n);
    for (int round = 0; round < rounds && best > bound && height != SIZE_MAX; round++) {
        int top = 0;
        while (order[top] != taken->highest) top++;
        memmove(order + 1, order, sizeof *order * (size_t)top);
        order[0] = taken->highest;
        tightest = !tightest;
        height = tt__place_in_order(box, order, n, tightest, best - 1, taken);
        if (height >= best) continue;
        best = height;
        best_tightest = tightest;
        memcpy(best_order, order, sizeof *order * (size_t)n);
    }
    return rounds ? tt__place_in_order(box, best_order, n, best_tightest, SIZE_MAX, taken) : best;
}

/* Places the boxes of one space. *height receives the bytes needed. *bound receives the largest sum of bytes
   in use at one instruction, and *peak_at this instruction. With few boxes, tries several orders until the
   height is the bound. With many boxes, an order of the large boxes whose height is within 1/256 of their
   bound is enough; boxes below 1/1024 of the bound are placed last, into the gaps. A box merged into another
   takes over its place. */
static tt_status tt__place(tt_context *ctx, tt__box *box, int n, int instructions, tt__space space,
                           size_t *height, size_t *bound, int *peak_at)
{
    int *order = (int *)tt__alloc(ctx, sizeof(int) * (size_t)(n + 1) * 2), large = 0, all = 0, winner = 0, at;
    tt__taken taken;
    bool room = tt__taken_open(ctx, &taken, instructions) && order;
    *bound = tt__max_live(box, n, instructions, space, 0, ctx, peak_at);
    size_t min = n < TT__FEW_BOXES ? 0 : *bound / 1024, best = SIZE_MAX;
    size_t goal = tt__max_live(box, n, instructions, space, min, ctx, &at);
    room = room && *bound != SIZE_MAX && goal != SIZE_MAX;
    for (int k = 0; k < 2 * n && room; k++) { /* large boxes, then small ones */
        const tt__box *b = &box[k % n];
        if (b->merged != k % n || b->space != space || !b->bytes || (b->bytes < min) != (k >= n)) continue;
        order[all++] = k % n;
        large += k < n;
    }
    const size_t enough = n < TT__FEW_BOXES ? goal : goal + goal / 256;
    for (int attempt = 0; room && attempt < 2 * TT__ORDERS && best > enough; attempt++) {
        tt__sort_boxes(box, order, order + n, large, attempt / 2, *peak_at);
        size_t h = tt__place_in_order(box, order, large, attempt % 2 == 1, best - 1, &taken);
        room = h != SIZE_MAX;
        if (h >= best) continue;
        best = h;
        winner = attempt;
    }
    *height = SIZE_MAX;
    if (room) {
        tt__sort_boxes(box, order, order + n, large, winner / 2, *peak_at);
        tt__sort_boxes(box, order + large, order + n, all - large, 0, *peak_at);
        *height = tt__improve(box, order, order + n, all, winner % 2 == 1, *bound, &taken);
    }
    for (int k = 0; k < n; k++) {
        int root = k;
        while (box[root].merged != root) root = box[root].merged;
        box[k].place = box[root].place;
    }
    tt__taken_close(&taken);
    tt__free(ctx, order);
    return *height == SIZE_MAX ? TT_ERR_MEMORY : TT_OK;
}

static size_t tt__arena_bytes(const tt_tape *t, const tt__tape_value *v)
{
    return tt__align_to(tt__storage_bytes(v), t->alignment);
}

/* Fails if all storages, all workspaces and `more` bytes together are 2^62 bytes or more. Then no later sum
   overflows. */
static tt_status tt__check_total(const tt_tape *t, size_t more)
{
    const size_t max = SIZE_MAX / 4;
    int32_t largest = 0;
    size_t total = more, bytes, of_largest = 0;
    char what[256];
    for (int32_t v = 1; v < t->n_values && total <= max; v++) {
        if (t->values[v].base != v) continue;
        total += bytes = tt__arena_bytes(t, &t->values[v]);
        if (bytes <= of_largest) continue;
        of_largest = bytes;
        largest = v;
    }
    for (int k = 0; k < t->n_code && total <= max; k++)
        total += tt__align_to(t->code[k].workspace, t->alignment);
    if (total <= max) return TT_OK;
    return tt__fail(t->ctx, TT_ERR_SHAPE, "the tensors of the program need 2^62 bytes or more, which is too "
                    "many: make them smaller, first of all %s", tt__describe(t, largest, what, sizeof what));
}

/* Fills in box[at]. value: a storage; 0: the box is a workspace. */
static void tt__new_box(const tt_tape *t, tt__box *box, int at, int32_t value, size_t bytes, int first,
                        int last)
{
    const tt__box b = {first, last, tt__align_to(bytes, t->alignment), 0, value, at, t->values[value].space};
    box[at] = b;
}

/* Finds the lifetimes of a tape's transient storages and workspaces. The caller frees *out. Operands of
   instructions that run together live from the first to the last of these instructions; operands of work on
   another stream live until its WAIT. */
static tt_status tt__lifetimes(tt_tape *t, int32_t root, tt__box **out, int *count)
{
    tt_context *ctx = t->ctx;
    const int end = t->n_code > 0 ? t->n_code - 1 : 0;
    tt__box *box = (tt__box *)tt__calloc(ctx, sizeof *box * ((size_t)t->n_values + (size_t)t->n_code));
    int *of = (int *)tt__alloc(ctx, sizeof *of * (size_t)t->n_values); /* index of each storage's box; -1:
                                                                          none */
    int n = 0, group = 0, group_end = 0; /* instructions [group, group_end] run together with instruction k */
    const int micro_end = (int)tt__max(0, tt__segment_first(t, TT__EACH_LAP) - 1);
    *out = box;
    if (!box || !of) { tt__free(ctx, of); tt__free(ctx, box); *out = NULL; return TT_ERR_MEMORY; }
    for (int32_t v = 0; v < t->n_values; v++) of[v] = -1;
    for (int k = 0; k < t->n_code; k++) {
        const tt__instr *i = &t->code[k];
        if (k == 0 || !i[-1].with_next) group = group_end = k;
        while (t->code[group_end].with_next) group_end++;
        for (int j = 0; j < TT__MAX_IN + TT__MAX_OUT; j++) {
            int32_t id = j < TT__MAX_IN ? i->in[j] : i->out[j - TT__MAX_IN];
            if (!id) continue;
            int32_t base = t->values[id].base;
            const tt__tape_value *v = &t->values[base];
            if (v->persistent) continue;
            bool given = v->storage == TT__INPUT || base == t->run; /* the host writes the storage before the
                                                                       run */
            const int first = given ? 0 : group;
            if (of[base] < 0)
                tt__new_box(t, box, of[base] = n++, base, tt__storage_bytes(v), v->saved ? 0 : first, 0);
            const int last = v->saved && group_end < micro_end ? micro_end : group_end;
            box[of[base]].last = v->keep || base == t->values[root].base ? end : last;
        }
        if (!i->workspace) continue;
        tt__new_box(t, box, n++, 0, i->workspace, k, k);
        box[n - 1].space = i->on_host ? TT__HOST : TT__DEVICE;
    }
    for (int32_t v = 1; v < t->n_values; v++) { /* inputs that no instruction reads, but tt_get may */
        const tt__tape_value *x = &t->values[v];
        bool kept = x->keep || v == t->values[root].base;
        if (x->storage != TT__INPUT || x->base != v || of[v] >= 0 || !kept) continue;
        tt__new_box(t, box, of[v] = n++, v, tt__storage_bytes(x), 0, end);
    }
    /* Results in place: out[0] takes over the place of in[j], whose life ends at this instruction. All boxes
       of a chain of such results are merged into the first. */
    for (int k = 0; k < t->n_code; k++) {
        const tt__instr *i = &t->code[k];
        int32_t y = i->out[0];
        if (!y || (i->add & 1) || t->values[y].base != y || of[y] < 0 || box[of[y]].first != k) continue;
        for (int j = 0; j < 2; j++) {
            int32_t x = i->in[j];
            if (!tt__is(i, j ? TT__INPLACE1 : TT__INPLACE0)) continue;
            if (!x || t->values[x].base != x || of[x] < 0) continue;
            const tt__shape *a = &t->values[x].shape, *b = &t->values[y].shape;
            const tt__box *from = &box[of[x]], *to = &box[of[y]];
            if (from->last != k || from->bytes != to->bytes || from->space != to->space) continue;
            if (a->dtype != b->dtype || a->cols != b->cols) continue;
            bool read_twice = false;
            for (int m = 0; m < TT__MAX_IN; m++) read_twice |= m != j && t->values[i->in[m]].base == x;
            if (read_twice) continue;
            int start = of[x];
            while (box[start].merged != start) start = box[start].merged;
            box[of[y]].merged = start;
            box[start].last = box[of[y]].last;
            of[y] = start; /* a result that takes over y's place later is merged into the same box */
            break;
        }
    }
    tt__free(ctx, of);
    *count = n;
    return TT_OK;
}

/* Returns whether any bytes at b's place are already in use during b's life. */
static bool tt__overlaps(tt__taken *t, const tt__box *b)
{
    int head[TT__TAKEN_LISTS], n = tt__taken_lists(t, b, 1, 0, t->leaves, head, 0);
    for (int k = 0; k < n; k++) {
        if (t->span[head[k]].to <= b->place) head[k] = t->span[tt__span_before(t, head[k], b->place)].next;
        if (head[k] && t->span[head[k]].from < b->place + b->bytes) return true;
    }
    return false;
}

/* Returns whether boxes k and j are in use at the same time and overlap in memory. */
static bool tt__collide(const tt__box *box, int k, int j)
{
    const tt__box *a = &box[k], *b = &box[j];
    bool apart = a->last < b->first || b->last < a->first || a->merged != k || a->space != b->space;
    return !apart && a->place < b->place + b->bytes && b->place < a->place + a->bytes;
}

/* Verifies that storages in use at the same time do not overlap, and that all storages end below `height`. */
static tt_status tt__verify_places(tt_tape *t, const tt__box *box, int n, tt__space space, size_t height)
{
    tt_status status = TT_OK;
    tt__taken taken;
    if (!t->ctx->options.verify) return TT_OK;
    int end = 1;
    for (int k = 0; k < n; k++) if (box[k].last >= end) end = box[k].last + 1;
    if (!tt__taken_open(t->ctx, &taken, end) || !tt__taken_clear(&taken)) status = TT_ERR_MEMORY;
    for (int k = 0; k < n && status == TT_OK; k++) {
        const tt__box *b = &box[k];
        if (b->space != space) continue;
        if (b->place % t->alignment || b->place > height || b->bytes > height - b->place) {
            status = tt__fail(t->ctx, TT_ERR_INTERNAL, "planner: storage %d of %zu bytes at %zu leaves its "
                              "region of %zu; please report this program", k, b->bytes, b->place, height);
        } else if (b->merged == k && b->bytes && tt__overlaps(&taken, b)) {
            int other = 0;
            while (!tt__collide(box, other, k)) other++;
            status = tt__fail(t->ctx, TT_ERR_INTERNAL, "planner: storages %d and %d overlap while both are "
                              "in use; please report this program", k, other);
        } else if (b->merged == k && b->bytes && !tt__take(&taken, b, 1, 0, taken.leaves)) {
            status = TT_ERR_MEMORY;
        }
    }
    tt__taken_close(&taken);
    return status;
}
