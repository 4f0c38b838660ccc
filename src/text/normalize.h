#pragma once
#include "../base/base.h"
#include "code_points.h"
#include "unicode.h"
#include "../files/utf8.h"
#include "types.h"
#include "lookups.h"
#include "encoder.h"

/* --------------------------------------------------------------------------------- tokenizer: normalizers */

/* The state of a normalizer that writes a new text piece by piece from an old text. The state also tells
   which bytes of the new text come from the front of the old text (tt__encoder.front), as NormalizedString of
   the package `tokenizers` aligns the two. A piece with change 0 replaces the next character of the old text;
   a piece with change -n replaces n more characters; a piece with change 1 belongs to the characters that the
   previous piece replaces. */
typedef struct tt__rewrite {
    tt__encoder *e;
    tt__buffer *to;
    char *out;             /* the new text so far, n bytes */
    size_t n, room;
    bool aligns;           /* the caller wants spans or tt__encoder.front; otherwise the fields below are
                              unused */
    const char *text;      /* the old text */
    size_t bytes, front;
    size_t at, to_front;   /* at: bytes read of the old text; to_front: bytes of the new text that come from
                              the old text's `front` */
    size_t size;           /* bytes of the last piece, whose `change` may still decrease; 0: no piece */
    int64_t change;        /* change of the last piece */
    tt__buffer *map;       /* the spans of the first `mapped` bytes of the new text; NULL: not wanted */
    size_t mapped;
} tt__rewrite;

/* Makes room for `more` bytes of the new text. Returns false if memory runs out or ran out earlier. */
static bool tt__rewrite_room(tt__rewrite *w, size_t more)
{
    tt_context *ctx = w->e->k->ctx;
    if (!w->e->failed && w->room - w->n >= more) return true;
    const bool fits = more < SIZE_MAX / 8 && w->room < SIZE_MAX / 8 && !w->e->failed;
    const size_t room = 2 * (w->room + more);
    char *larger = fits ? (char *)tt__try_alloc(ctx, room) : NULL;
    w->e->failed = !larger;
    if (!larger) return false;
    if (w->n) memcpy(larger, w->out, w->n);
    tt__free(ctx, w->to->memory);
    w->to->memory = w->out = larger;
    w->to->bytes = w->room = room;
    return true;
}

/* Begins a new text in one of the encoder's buffers. */
static tt__rewrite tt__rewrite_begin(tt__encoder *e, int buffer, const char *text, size_t bytes, bool aligns)
{
    tt__rewrite w = {e, &e->buffers[buffer], NULL, 0, 0, aligns, text, bytes, e->front, 0, 0, 0, 0,
                     e->spans ? &e->maps[buffer] : NULL, 0};
    const bool few = buffer < TT__SPLIT_TEXT && !w.to->memory;
    w.out = few ? e->few[buffer] : (char *)w.to->memory;
    w.room = few ? (size_t)TT__FEW : w.to->bytes;
    tt__rewrite_room(&w, bytes);
    return w;
}

/* Gives each byte of the piece that was written last the span of the old character that the piece
   replaces. */
static void tt__rewrite_map(tt__rewrite *w)
{
    const size_t all = (w->mapped + w->size) * sizeof(tt_span);
    const size_t old = w->change > 0 && w->at ? w->at - 1 : w->at;
    if (all > w->map->bytes) {
        void *larger = tt__try_alloc(w->e->k->ctx, 2 * all);
        w->e->failed |= !larger;
        if (!larger) return;
        if (w->mapped) memcpy(larger, w->map->memory, w->mapped * sizeof(tt_span));
        tt__free(w->e->k->ctx, w->map->memory);
        w->map->memory = larger;
        w->map->bytes = 2 * all;
    }
    tt_span *spans = (tt_span *)w->map->memory, span = {0, 0};
    if (w->bytes) span = tt__encoder_span(w->e, w->text + (old < w->bytes ? old : w->bytes - 1));
    for (size_t i = 0; i < w->size; i++) spans[w->mapped++] = span;
}

/* Ends the piece that was written last: moves past the old characters that the piece replaces. If the piece
   comes from a character of the old text's front (tt__encoder.front), the piece's bytes belong to the front
   of the new text. */
static void tt__rewrite_pass(tt__rewrite *w)
{
    const bool with = w->change > 0 ? !w->at || w->at - 1 < w->front : w->at < w->front;
    if (!w->size) return;
    if (w->map) tt__rewrite_map(w);
    if (with) w->to_front += w->size;
    for (int64_t n = w->change; n <= 0 && w->at < w->bytes; n++) tt__utf8_next(w->text, w->bytes, &w->at);
    w->size = 0;
}

static void tt__rewrite_put(tt__rewrite *w, const char *text, size_t bytes, int64_t change)
{
    if (!tt__rewrite_room(w, bytes)) return;
    if (bytes) memcpy(w->out + w->n, text, bytes);
    w->n += bytes;
    if (!w->aligns) return;
    tt__rewrite_pass(w);
    w->size = bytes;
    w->change = change;
}

static void tt__rewrite_point(tt__rewrite *w, uint32_t c, int64_t change)
{
    char text[4];
    tt__rewrite_put(w, text, (size_t)tt__utf8_put(c, text), change);
}

/* Skips bytes of the old text that have no counterpart in the new text. */
static void tt__rewrite_skip(tt__rewrite *w, size_t bytes)
{
    tt__rewrite_pass(w);
    w->at += bytes;
}

/* Writes `to` in place of `part` of the old text. to = NULL: writes `part` unchanged. */
static void tt__rewrite_part(tt__rewrite *w, const char *part, size_t bytes, const char *to, size_t to_bytes)
{
    int64_t old = 0, made = 0;
    if (!to) to = part, to_bytes = bytes;
    if (!w->aligns) {
        tt__rewrite_put(w, to, to_bytes, 0);
        return;
    }
    for (size_t at = 0; at < bytes; old++) tt__utf8_next(part, bytes, &at);
    for (size_t at = 0, from = 0; at < to_bytes; from = at) {
        tt__utf8_next(to, to_bytes, &at);
        tt__rewrite_put(w, to + from, at - from, made++ >= old);
    }
    if (made < old) w->change -= old - made; /* without effect if no piece was written */
}

/* Writes `to` and then the first character of the old text. `to` counts as a part of that character. Returns
   the bytes of the character. */
static size_t tt__rewrite_prepend(tt__rewrite *w, const char *to, size_t to_bytes)
{
    size_t first = 0;
    tt__utf8_next(w->text, w->bytes, &first);
    tt__rewrite_put(w, to, to_bytes, 0);
    tt__rewrite_put(w, w->text, first, 1);
    return first;
}

/* Ends the new text and returns it. If spans are wanted, e->layer becomes this text. */
static const char *tt__rewrite_end(tt__rewrite *w, size_t *bytes)
{
    tt__rewrite_pass(w);
    if (w->aligns) w->e->front = w->to_front;
    if (w->map && !w->e->failed) w->e->layer = w->out, w->e->map = (const tt_span *)w->map->memory;
    *bytes = w->n;
    return w->out;
}

/* ---- composition and decomposition (Unicode Standard, section 3.11) */

typedef struct tt__changed { uint32_t point; int32_t change; } tt__changed;

/* Sorts the marks of each run of combining marks by their combining class. `spare` has room for n
   characters. */
static void tt__sort_marks(const tt__unicode *u, tt__changed *c, size_t n, tt__changed *spare)
{
    for (size_t i = 0, end; i < n; i = end + 1) {
        size_t to = i;
        uint32_t lowest = UINT32_MAX, rank, before = 0;
        bool sorted = true;
        for (end = i; end < n && (rank = tt__mark_rank(u, c[end].point)) > 0; end++) {
            sorted &= rank >= before;
            lowest = rank < lowest ? rank : lowest;
            before = rank;
        }
        while (!sorted && to < end) { /* a sweep for each combining class, at most 63 */
            uint32_t next = UINT32_MAX;
            for (size_t k = i; k < end; k++) {
                rank = tt__mark_rank(u, c[k].point);
                if (rank == lowest) spare[to++] = c[k];
                else if (rank > lowest && rank < next) next = rank;
            }
            lowest = next;
        }
        if (!sorted) memcpy(c + i, spare + i, (end - i) * sizeof *c);
    }
}

/* Composes characters that were decomposed and whose marks were sorted. Returns how many characters are
   left. */
static size_t tt__compose_all(const tt__unicode *u, tt__changed *c, size_t count)
{
    size_t kept = 0, starter = SIZE_MAX;
    uint32_t before = 0; /* rank of the character kept after the starter; 0: none */
    for (size_t i = 0; i < count; i++) {
        const uint32_t rank = tt__mark_rank(u, c[i].point);
        const bool free_way = starter != SIZE_MAX && (kept == starter + 1 || before < rank);
        const uint32_t composed = free_way ? tt__compose(u, c[starter].point, c[i].point) : 0;
        if (composed) {
            c[starter].point = composed;
            c[starter].change += c[i].change - 1;
            continue;
        }
        if (!rank) starter = kept;
        before = rank;
        c[kept++] = c[i];
    }
    return kept;
}

/* Decomposes a part of the old text, composes the result if `kind` is NFC, and writes it to the new text. The
   start and the end of the part must be boundaries, across which no mark moves and no characters compose. */
static void tt__rewrite_decomposed(tt__rewrite *w, tt__step_kind kind, const char *text, size_t bytes)
{
    const tt__unicode *u = w->e->k->unicode;
    tt__changed few[2][640], *c = few[0], *spare = few[1];
    /* The part has at most bytes / 2 + 1 characters, because all but the first have at least two bytes. */
    size_t count = 0, max = (size_t)(kind == TT__STEP_NFKD ? TT__DECOMPOSED : 4) * (bytes / 2 + 1);
    if (bytes > INT32_MAX) { w->e->failed = true; return; }
    if (max > TT__COUNT(few[0])) {
        c = (tt__changed *)tt__encoder_room(w->e, TT__POINTS, 2 * max, sizeof *c);
        if (!c) return;
        spare = c + max;
    }
    for (size_t at = 0; at < bytes;) {
        uint32_t to[TT__DECOMPOSED];
        const size_t n = tt__decompose(u, tt__utf8_next(text, bytes, &at), kind == TT__STEP_NFKD, to);
        for (size_t i = 0; i < n; i++) c[count].point = to[i], c[count++].change = i > 0;
    }
    tt__sort_marks(u, c, count, spare);
    if (kind == TT__STEP_NFC) count = tt__compose_all(u, c, count);
    for (size_t i = 0; i < count; i++) tt__rewrite_point(w, c[i].point, c[i].change);
}

/* Returns whether the start of character c is a boundary, across which no mark moves and no characters
   compose. */
static bool tt__stands(const tt__unicode *u, tt__step_kind kind, uint32_t c)
{
    uint32_t to[TT__DECOMPOSED];
    if (c < 0x300) return true;
    if (kind == TT__STEP_NFC) return !(u->bits[c] & TT__IS_UNSTABLE);
    tt__decompose(u, c, kind == TT__STEP_NFKD, to);
    return !tt__mark_rank(u, to[0]);
}

/* Normalizes a text to NFC, NFD or NFKD. */
static void tt__rewrite_composition(tt__rewrite *w, tt__step_kind kind, const char *text, size_t bytes)
{
    const tt__unicode *u = w->e->k->unicode;
    for (size_t at = 0, end = 0; at < bytes && !w->e->failed; at = end) {
        const uint32_t c = tt__utf8_next(text, bytes, &end);
        bool same = kind == TT__STEP_NFC ? !(u->bits[c] & TT__IS_UNSTABLE) : c < 0x80;
        for (size_t next = end; next < bytes; end = next, same = false)
            if (tt__stands(u, kind, tt__utf8_next(text, bytes, &next))) break;
        if (same) tt__rewrite_put(w, text + at, end - at, 0);
        else tt__rewrite_decomposed(w, kind, text + at, end - at);
    }
}

/* ---- Precompiled */

/* Returns the end of the grapheme that begins at `at`. */
static size_t tt__grapheme_end(const tt__unicode *u, const char *text, size_t bytes, size_t at)
{
    /* Flags for the characters read last. picture: a picture and its extenders. joined: a picture, its
       extenders and then a joiner. consonant: a consonant and its extenders. linked: a consonant and its
       extenders, with a linker among them. */
    bool picture = false, joined = false;
    bool consonant = false, linked = false;
    int before = TT__GRAPHEME_OTHER;
    for (size_t end = at, next = at; end < bytes; end = next) {
        const uint32_t c = tt__utf8_next(text, bytes, &next);
        const int kind = tt__grapheme_class(u, c);
        const bool extends = kind == TT__GRAPHEME_EXTEND || kind == TT__GRAPHEME_EXTEND_ALONE ||
                             kind == TT__GRAPHEME_LINKER;
        if (end > at) {
            const bool l_before = before == TT__GRAPHEME_L, v = kind == TT__GRAPHEME_V;
            const bool syllable = kind == TT__GRAPHEME_LV || kind == TT__GRAPHEME_LVT;
            const bool v_before = before == TT__GRAPHEME_V || before == TT__GRAPHEME_LV;
            const bool t_before = before == TT__GRAPHEME_T || before == TT__GRAPHEME_LVT;
            if (before == TT__GRAPHEME_CONTROL || kind == TT__GRAPHEME_CONTROL)
                return c == '\n' && text[at] == '\r' && end == at + 1 ? next : end;
            const bool together =
                extends || kind == TT__GRAPHEME_JOINER || kind == TT__GRAPHEME_SPACING ||
                before == TT__GRAPHEME_PREPEND || (l_before && (v || syllable || kind == TT__GRAPHEME_L)) ||
                (v_before && (v || kind == TT__GRAPHEME_T)) || (t_before && kind == TT__GRAPHEME_T) ||
                (joined && kind == TT__GRAPHEME_PICTURE) || (linked && kind == TT__GRAPHEME_CONSONANT);
            if (!together) return end;
        }
        joined = picture && kind == TT__GRAPHEME_JOINER;
        picture = kind == TT__GRAPHEME_PICTURE || (picture && extends);
        linked = consonant && (kind == TT__GRAPHEME_LINKER ||
                               (linked && (kind == TT__GRAPHEME_EXTEND || kind == TT__GRAPHEME_JOINER)));
        consonant = kind == TT__GRAPHEME_CONSONANT ||
                    (consonant && (kind == TT__GRAPHEME_EXTEND || kind == TT__GRAPHEME_LINKER ||
                                   kind == TT__GRAPHEME_JOINER));
        before = kind;
    }
    return bytes;
}

/* Finds the shortest prefix of `text` that a Precompiled map has, and returns the text that replaces the
   prefix. Returns NULL if the map has no prefix of `text`. The map is a double-array trie (Aoe 1989; Yata's
   darts-clone), an array of 32-bit units. A byte b leads from a node at position p to the unit at p xor b,
   whose lowest 8 bits must equal b. If bit 8 of that unit is set, the map has the prefix that ends with b,
   and the unit at the new node's position has the offset of the replacing text. */
static const char *tt__precompiled_find(const tt__text_step *s, const char *text, size_t bytes,
                                        size_t *to_bytes)
{
    const size_t count = s->from_bytes / 4;
    size_t at = 0;
    uint32_t unit;
    memcpy(&unit, s->from, 4);
    for (size_t i = 0; i <= bytes; i++) {
        at ^= (size_t)(unit >> 10) << (unit >> 6 & 8);
        if (at >= count) return NULL;
        if (i && unit >> 8 & 1) {
            memcpy(&unit, s->from + 4 * at, 4);
            const size_t place = unit & INT32_MAX;
            if (place > s->to_bytes || ((uint8_t)s->to[place] & 0xC0) == 0x80) return NULL;
            *to_bytes = strlen(s->to + place); /* every text ends with a NUL */
            return s->to + place;
        }
        if (i == bytes || !text[i]) return NULL;
        at ^= (uint8_t)text[i];
        if (at >= count) return NULL;
        memcpy(&unit, s->from + 4 * at, 4);
        if ((unit & 0x800000FF) != (uint8_t)text[i]) return NULL;
    }
    return NULL;
}

/* Applies a Precompiled map as the package `tokenizers` does. If a grapheme has less than 6 bytes and the map
   has a prefix of it, the prefix's replacement replaces the whole grapheme. In any other grapheme, each
   character is replaced separately. */
static void tt__rewrite_precompiled(tt__rewrite *w, const tt__text_step *s, const char *text, size_t bytes)
{
    for (size_t at = 0; at < bytes;) {
        size_t end = at + 1, to_bytes = 0;
        const bool ascii = (uint8_t)text[at] < 0x80 && text[at] != '\r' &&
                           (end == bytes || (uint8_t)text[end] < 0x80);
        if (!ascii) end = tt__grapheme_end(w->e->k->unicode, text, bytes, at);
        const char *to = end - at < 6 ? tt__precompiled_find(s, text + at, end - at, &to_bytes) : NULL;
        while (at < end) {
            size_t next = end;
            if (!to) {
                next = at;
                tt__utf8_next(text, end, &next);
                to = tt__precompiled_find(s, text + at, next - at, &to_bytes);
            }
            tt__rewrite_part(w, text + at, next - at, to, to_bytes);
            at = next;
            to = NULL;
        }
    }
}

/* ---- normalizers of single characters, and of strings */

/* Applies normalizer StripAccents, Lowercase or a step of BERT's normalizer to one character. Writes the
   resulting code points to `to` and returns their number. */
static size_t tt__mapped(const tt__unicode *u, tt__step_kind kind, uint32_t c, uint32_t to[3])
{
    to[0] = c;
    switch (kind) {
    case TT__STEP_LOWER: return tt__lower_case(u, c, to);
    case TT__STEP_CLEAN:
        if (u->bits[c] & TT__IS_SPACE) to[0] = ' ';
        return u->bert[c] == TT__BERT_DROP ? 0 : 1;
    case TT__STEP_CJK:
        to[1] = c;
        if (tt__is_cjk(c)) to[0] = to[2] = ' ';
        return tt__is_cjk(c) ? 3 : 1;
    case TT__STEP_NONSPACING: return u->bert[c] == TT__BERT_ACCENT ? 0 : 1;
    default: return u->bits[c] & TT__IS_ACCENT ? 0 : 1;
    }
}

/* Applies a normalizer to an ASCII character. A result above 0x7F means that the normalizer drops the
   character. */
static uint8_t tt__mapped_ascii(tt__step_kind kind, uint8_t c)
{
    if (kind == TT__STEP_LOWER) return (uint8_t)(c >= 'A' && c <= 'Z' ? c + 32 : c);
    if (kind != TT__STEP_CLEAN || (c >= ' ' && c != 0x7F)) return c;
    return c == '\t' || c == '\n' || c == '\r' ? ' ' : 0x80;
}

static void tt__rewrite_mapped(tt__rewrite *w, tt__step_kind kind, const char *text, size_t bytes)
{
    for (size_t at = 0, from = 0; at < bytes; from = at) {
        uint32_t to[3];
        while (!w->aligns && at < bytes && (uint8_t)text[at] < 0x80) at++;
        if (at > from && tt__rewrite_room(w, at - from)) {
            char *out = w->out + w->n;
            for (; from < at; from++) {
                const uint8_t c = tt__mapped_ascii(kind, (uint8_t)text[from]);
                *out = (char)c;
                out += c < 0x80;
            }
            w->n = (size_t)(out - w->out);
        }
        if (at == bytes || w->e->failed) break;
        const size_t n = tt__mapped(w->e->k->unicode, kind, tt__utf8_next(text, bytes, &at), to);
        for (size_t i = 0; i < n; i++) tt__rewrite_point(w, to[i], i > 0);
        if (!n) tt__rewrite_skip(w, at - from);
    }
}

/* Replaces every occurrence of s->from, or every run of two or more spaces, by s->to. The span of s->to is
   the span of the last character that is replaced. */
static void tt__rewrite_replaced(tt__rewrite *w, const tt__text_step *s, const char *text, size_t bytes)
{
    size_t from = 0; /* the bytes of the old text before `from` are in the new text */
    for (size_t at = 0, n; at < bytes; at += n ? n : 1) {
        n = 0;
        if (text[at] != s->from[0]) continue;
        if (s->kind == TT__STEP_SPACES) while (at + n < bytes && text[at + n] == ' ') n++;
        else if (bytes - at >= s->from_bytes && memcmp(text + at, s->from, s->from_bytes) == 0)
            n = s->from_bytes;
        if (n < s->from_bytes) continue;
        tt__rewrite_part(w, text + from, at - from, NULL, 0);
        tt__rewrite_skip(w, n);
        tt__rewrite_put(w, s->to, s->to_bytes, 1);
        from = at + n;
    }
    tt__rewrite_part(w, text + from, bytes - from, NULL, 0);
}

static const char *tt__trim(tt__encoder *e, const tt__text_step *s, const char *text, size_t *bytes)
{
    const uint8_t *bits = e->k->unicode->bits;
    size_t from = 0, end = *bytes;
    if (s->left) from = tt__bits_end(bits, TT__IS_SPACE, TT__IS_SPACE, text, end, 0);
    if (s->right) end = tt__white_begin(bits, text, from, end);
    *bytes = end - from;
    e->front = e->front > from ? e->front - from : 0;
    return text + from;
}

/* Returns whether a normalizer leaves a text unchanged. */
static bool tt__is_normal(const tt__unicode *u, tt__step_kind kind, const char *text, size_t bytes)
{
    if (kind > TT__STEP_NONSPACING || kind == TT__STEP_LOWER || kind == TT__STEP_CLEAN) return false;
    if (kind != TT__STEP_NFC) return tt__is_ascii(text, bytes);
    return tt__bits_end(u->bits, TT__IS_UNSTABLE, 0, text, bytes, 0) == bytes;
}

/* Computes k->ascii, the result of all normalizers for each ASCII character: most texts are ASCII. */
static void tt__normalize_ascii_by(tt_tokenizer *k)
{
    bool maps = false, others = false;
    for (uint8_t c = 0; c < 128; c++) k->ascii[c] = c;
    for (int i = 0; i < k->normalize.n; i++) {
        const tt__step_kind kind = k->normalize.all[i].kind;
        maps |= kind == TT__STEP_LOWER || kind == TT__STEP_CLEAN;
        others |= kind > TT__STEP_NONSPACING;
        for (uint8_t c = 0; c < 128; c++)
            if (k->ascii[c] < 128) k->ascii[c] = tt__mapped_ascii(kind, k->ascii[c]);
    }
    k->maps_ascii = maps && !others;
}

/* Returns the normalized text: `text` itself if the normalizers change nothing. */
static const char *tt__normalize_text(tt__encoder *e, const char *text, size_t *bytes)
{
    const tt_tokenizer *k = e->k;
    bool aligns = e->spans != NULL; /* whether spans are wanted, or a splitter needs e->front */
    for (int i = 0; i < k->split.n; i++) aligns |= k->split.all[i].prefix_first;
    e->front = 0;
    if (*bytes) tt__utf8_next(text, *bytes, &e->front);
    if (e->ascii && k->maps_ascii && !aligns) {
        tt__rewrite w = tt__rewrite_begin(e, TT__NORMAL_TEXT, text, *bytes, false);
        for (size_t i = 0; i < *bytes && !e->failed; i++) {
            const uint8_t c = k->ascii[(uint8_t)text[i]];
            w.out[w.n] = (char)c;
            w.n += c < 128;
        }
        return tt__rewrite_end(&w, bytes);
    }
    for (int i = 0, turn = 0; i < k->normalize.n && *bytes && !e->failed; i++) {
        const tt__text_step *s = &k->normalize.all[i];
        if (s->kind == TT__STEP_TRIM) text = tt__trim(e, s, text, bytes);
        if (s->kind == TT__STEP_TRIM || tt__is_normal(k->unicode, s->kind, text, *bytes)) continue;
        /* Writes to two buffers in turn, because one of them may hold the old text. */
        tt__rewrite w = tt__rewrite_begin(e, TT__NORMAL_TEXT + turn, text, *bytes, aligns);
        size_t first = 0;
        switch (s->kind) {
        case TT__STEP_NFC: case TT__STEP_NFD: case TT__STEP_NFKD:
            tt__rewrite_composition(&w, s->kind, text, *bytes);
            break;
        case TT__STEP_PREPEND:
            first = tt__rewrite_prepend(&w, s->to, s->to_bytes);
            tt__rewrite_part(&w, text + first, *bytes - first, NULL, 0);
            break;
        case TT__STEP_PRECOMPILED: tt__rewrite_precompiled(&w, s, text, *bytes); break;
        case TT__STEP_REPLACE: case TT__STEP_SPACES: tt__rewrite_replaced(&w, s, text, *bytes); break;
        default: tt__rewrite_mapped(&w, s->kind, text, *bytes);
        }
        text = tt__rewrite_end(&w, bytes);
        turn ^= 1;
    }
    return text;
}
