#pragma once
#include "../base/base.h"
#include "../files/utf8.h"
#include "unicode.h"
#include "vocabulary.h"
#include "wordpiece.h"
#include "bpe.h"
#include "merges.h"
#include "split.h"

/* ---- normalizers */

/* What becomes of the front of a text (see tt__encoder), as `tokenizers` aligns it (NormalizedString): a
   normalizer gives new characters, one by one. One with a change of 0 stands for the old text's next
   character, one of -n for the n behind that too, and one of 1 for what the one before it stands for. */
typedef struct tt__aligner {
    const char *text;
    size_t bytes, front;  /* of the old text */
    size_t at, to;        /* what of it is passed; the new front, so far */
    size_t size;          /* of the new character at hand, whose change may still become less; 0: none is */
    int64_t change;
} tt__aligner;

static void tt__front_pass(tt__aligner *f)
{
    const bool with = f->change > 0 ? !f->at || f->at - 1 < f->front : f->at < f->front;
    if (!f->size) return;
    if (with) f->to += f->size;
    for (int64_t n = f->change; n <= 0 && f->at < f->bytes; n++) tt__utf8_next(f->text, f->bytes, &f->at);
    f->size = 0;
}

static void tt__front_put(tt__aligner *f, size_t size, int64_t change)
{
    tt__front_pass(f);
    f->size = size;
    f->change = change;
}

/* Is all passed that the front can be? */
static bool tt__front_done(const tt__aligner *f) { return f->at > f->front; }

/* Characters that stand for a part of the old text together; to NULL: the part itself. */
static void tt__front_part(tt__aligner *f, const char *part, size_t bytes, const char *to, size_t to_bytes)
{
    int64_t old = 0, made = 0;
    for (size_t at = 0; at < bytes; old++) tt__utf8_next(part, bytes, &at);
    for (size_t at = 0, from = 0; at < to_bytes; from = at) {
        tt__utf8_next(to ? to : part, to_bytes, &at);
        tt__front_put(f, at - from, made++ >= old);
    }
    if (made < old) f->change -= old - made; /* of none, where the text begins with what is taken away */
}

typedef struct tt__changed { uint32_t point; int64_t change; } tt__changed;

/* NFC composes these, which are decomposed and sorted. Returns how many remain. */
static size_t tt__front_compose(const tt__letters *l, tt__changed *c, size_t count)
{
    size_t kept = 0, starter = SIZE_MAX;
    uint32_t before = 0; /* the rank of what was kept behind the starter; 0: nothing was */
    for (size_t i = 0; i < count; i++) {
        const uint32_t rank = tt__mark_rank(l, c[i].point);
        const bool free_way = starter != SIZE_MAX && (kept == starter + 1 || before < rank);
        const uint32_t composed = free_way ? tt__compose(l, c[starter].point, c[i].point) : 0;
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

/* NFC, NFD and NFKD: of the start of the text up to where nothing moves or composes over. */
static void tt__front_decomposed(tt__encoder *e, const tt__stage *s, tt__aligner *f)
{
    const tt__letters *l = e->b->letters;
    const bool composes = s->kind == TT__STAGE_NFC, compat = s->kind == TT__STAGE_NFKD;
    uint32_t to[TT__DECOMPOSED];
    size_t end = 0, count = 0, sorted = 0;
    for (size_t next = 0; next < f->bytes; end = next) {
        const uint32_t c = tt__utf8_next(f->text, f->bytes, &next);
        tt__decompose(l, c, compat, to);
        const bool stands = composes ? !(e->b->bits[c] & TT__IS_UNSTABLE) : !tt__mark_rank(l, to[0]);
        if (end >= f->front && stands) break;
    }
    if (end > SIZE_MAX / 1024) { e->failed = true; return; }
    tt__changed *c = (tt__changed *)tt__encoder_room(e, &e->points, TT__DECOMPOSED * end, sizeof *c);
    tt__changed *spare = (tt__changed *)tt__encoder_room(e, &e->spare, TT__DECOMPOSED * end, sizeof *c);
    if (e->failed) return;
    for (size_t at = 0; at < end;) {
        const size_t n = tt__decompose(l, tt__utf8_next(f->text, end, &at), compat, to);
        for (size_t i = 0; i < n; i++) c[count].point = to[i], c[count++].change = i > 0;
    }
    for (size_t run = 0, stop; run < count; run = stop + 1) { /* of marks, a pass for each rank there is */
        uint32_t rank, lowest = UINT32_MAX;
        for (stop = run; stop < count && (rank = tt__mark_rank(l, c[stop].point)) > 0; stop++)
            lowest = rank < lowest ? rank : lowest;
        for (sorted = run; sorted < stop;) {
            uint32_t next = UINT32_MAX;
            for (size_t i = run; i < stop; i++) {
                rank = tt__mark_rank(l, c[i].point);
                if (rank == lowest) spare[sorted++] = c[i];
                else if (rank > lowest && rank < next) next = rank;
            }
            lowest = next;
        }
        memcpy(c + run, spare + run, (stop - run) * sizeof *c);
    }
    if (composes) count = tt__front_compose(l, c, count);
    for (size_t i = 0; i < count && !tt__front_done(f); i++) {
        char spelled[4];
        tt__front_put(f, (size_t)tt__utf8_put(c[i].point, spelled), c[i].change);
    }
}

/* NFC of a text that has an unstable character at `at`. Only what is around those is looked at. */
static const char *tt__bpe_nfc(tt__encoder *e, const char *text, size_t *bytes, tt__buffer *to)
{
    const uint8_t *bits = e->b->bits;
    const size_t all = *bytes;
    /* U+1D160: 4 to 12. */
    char *out = all < SIZE_MAX / 3 ? (char *)tt__encoder_room(e, to, 3 * all, 1) : NULL;
    size_t copied = 0, last = 0, n = 0;
    if (!out) { e->failed = true; return NULL; }
    for (size_t at = 0; at < all;) {
        size_t from = at, count = 0;
        if (!(bits[tt__utf8_next(text, all, &at)] & TT__IS_UNSTABLE)) { last = from; continue; }
        size_t end = at; /* of the unstable run */
        for (size_t next = at; next < all; end = next)
            if (!(bits[tt__utf8_next(text, all, &next)] & TT__IS_UNSTABLE)) break;
        memcpy(out + n, text + copied, last - copied);
        n += last - copied;
        if (end - last > SIZE_MAX / 16) { e->failed = true; return NULL; }
        uint32_t *points = (uint32_t *)tt__encoder_room(e, &e->points, 4 * (end - last), 4);
        uint32_t *spare = (uint32_t *)tt__encoder_room(e, &e->spare, 4 * (end - last), 4);
        if (e->failed) return NULL;
        for (size_t next = last; next < end;) points[count++] = tt__utf8_next(text, end, &next);
        count = tt__nfc(e->b->letters, points, count, spare);
        for (size_t i = 0; i < count; i++) n += (size_t)tt__utf8_put(points[i], out + n);
        copied = last = at = end;
    }
    memcpy(out + n, text + copied, all - copied);
    *bytes = n + all - copied;
    return out;
}

/* Where the grapheme that begins at `at` ends. */
static size_t tt__grapheme_end(const tt__letters *l, const char *text, size_t bytes, size_t at)
{
    bool picture = false, joined = false;     /* a picture and what extends it; and a joiner */
    bool consonant = false, linked = false;   /* a consonant and what extends it, with a linker in that */
    int before = TT__GRAPHEME_OTHER;
    for (size_t end = at, next = at; end < bytes; end = next) {
        const uint32_t c = tt__utf8_next(text, bytes, &next);
        const int kind = tt__grapheme_class(l, c);
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

/* What a Precompiled has for the shortest start of a text that it knows; NULL: it knows none. Its units are a
   double-array trie (Aoe 1989; Yata's darts-clone): a byte leads from a node to its position xor the byte,
   where the unit's lowest bits repeat the byte. Bit 8 of a unit: a text is known here, and the first unit
   behind has its place. */
static const char *tt__precompiled_find(const tt__stage *s, const char *text, size_t bytes, size_t *to_bytes)
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
            *to_bytes = strlen(s->to + place); /* a NUL is behind the last one too */
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

/* A Precompiled, as `tokenizers` applies it: to graphemes of less than 6 bytes, of which it replaces all by
   what it has for their start, and to the characters of others. Returns the bytes; out NULL: only these.
   front, or NULL: is told what the characters stand for, as long as that may be the text's front. */
static size_t tt__precompiled(const tt__bpe *b, const tt__stage *s, const char *text, size_t bytes, char *out,
                              tt__aligner *front)
{
    size_t n = 0;
    for (size_t at = 0; at < bytes;) {
        size_t end = at + 1, to_bytes = 0;
        const bool ascii = (uint8_t)text[at] < 0x80 && text[at] != '\r' &&
                           (end == bytes || (uint8_t)text[end] < 0x80);
        if (!ascii) end = tt__grapheme_end(b->letters, text, bytes, at);
        const char *to = end - at < 6 ? tt__precompiled_find(s, text + at, end - at, &to_bytes) : NULL;
        while (at < end) {
            size_t next = end;
            if (!to) {
                next = at;
                tt__utf8_next(text, end, &next);
                to = tt__precompiled_find(s, text + at, next - at, &to_bytes);
            }
            if (!to) to_bytes = next - at;
            if (front && tt__front_done(front)) return n;
            if (front) tt__front_part(front, text + at, next - at, to, to_bytes);
            if (out) memcpy(out + n, to ? to : text + at, to_bytes);
            n += to_bytes;
            at = next;
            to = NULL;
        }
    }
    return n;
}

/* What a character becomes by NFD, NFKD, StripAccents, Lowercase or one of BERT's: so many code points. */
static size_t tt__mapped(const tt__bpe *b, tt__stage_kind kind, uint32_t c, uint32_t to[TT__DECOMPOSED])
{
    if (kind == TT__STAGE_LOWER) return tt__lower_case(b->letters, c, to);
    if (kind <= TT__STAGE_NFKD) return tt__decompose(b->letters, c, kind == TT__STAGE_NFKD, to);
    const int of = kind >= TT__STAGE_CLEAN ? tt__bpe_class_of(b, c) : (int)TT__CLASS_LETTER;
    to[0] = c;
    switch (kind) {
    case TT__STAGE_CLEAN:
        if (of == TT__CLASS_SPACE) to[0] = ' ';
        return of == TT__CLASS_DROP || c == 0xFFFD ? 0 : 1;
    case TT__STAGE_CJK:
        to[1] = c;
        if (tt__is_cjk(c)) to[0] = to[2] = ' ';
        return tt__is_cjk(c) ? 3 : 1;
    case TT__STAGE_NONSPACING: return of == TT__CLASS_ACCENT || of == TT__CLASS_STARTER_ACCENT ? 0 : 1;
    default: return b->bits[c] & TT__IS_ACCENT ? 0 : 1;
    }
}

/* Applies such a normalizer, without sorting marks. Returns the bytes; out NULL: only these. */
static size_t tt__map(const tt__bpe *b, tt__stage_kind kind, const char *text, size_t bytes, char *out)
{
    size_t n = 0;
    for (size_t at = 0; at < bytes;) {
        uint32_t to[TT__DECOMPOSED];
        char spelled[4];
        const size_t count = tt__mapped(b, kind, tt__utf8_next(text, bytes, &at), to);
        for (size_t i = 0; i < count; i++) n += (size_t)tt__utf8_put(to[i], out ? out + n : spelled);
    }
    return n;
}

/* Sorts the runs of marks of a text that is decomposed. */
static void tt__sort_text(tt__encoder *e, char *text, size_t bytes)
{
    const tt__letters *l = e->b->letters;
    for (size_t at = 0; at < bytes;) {
        size_t next = at, count = 0; /* of the run; `next` is behind the character that ends it */
        while (next < bytes && tt__mark_rank(l, tt__utf8_next(text, bytes, &next))) count++;
        if (count > 1) {
            uint32_t *points = (uint32_t *)tt__encoder_room(e, &e->points, count, 4);
            uint32_t *spare = (uint32_t *)tt__encoder_room(e, &e->spare, count, 4);
            if (e->failed) return;
            for (size_t i = 0, from = at; i < count; i++) points[i] = tt__utf8_next(text, bytes, &from);
            tt__sort_marks(l, points, count, spare);
            for (size_t i = 0; i < count; i++) at += (size_t)tt__utf8_put(points[i], text + at);
        }
        at = next;
    }
}

/* Replaces runs of two and more spaces; out has room for all. Returns the bytes. */
static size_t tt__replace_spaces(const tt__stage *s, const char *text, size_t bytes, char *out)
{
    size_t n = 0;
    for (size_t at = 0, end; at < bytes; at = end) {
        end = at + 1;
        while (text[at] == ' ' && end < bytes && text[end] == ' ') end++;
        const bool run = end - at > 1;
        memcpy(out + n, run ? s->to : text + at, run ? s->to_bytes : 1);
        n += run ? s->to_bytes : 1;
    }
    return n;
}

static const char *tt__trim(tt__encoder *e, const tt__stage *s, const char *text, size_t *bytes)
{
    const uint8_t *bits = e->b->bits;
    size_t from = 0, end = *bytes;
    if (s->left) from = tt__bits_end(bits, TT__IS_SPACE, TT__IS_SPACE, text, end, 0, SIZE_MAX);
    while (s->right && end > from) {
        const size_t last = tt__utf8_last(text, end);
        size_t next = last;
        if (!(bits[tt__utf8_next(text, end, &next)] & TT__IS_SPACE)) break;
        end = last;
    }
    *bytes = end - from;
    return text + from;
}

/* Sets e->front to what a normalizer will make of it. */
static void tt__front_after(tt__encoder *e, const tt__stage *s, const char *text, size_t bytes)
{
    const tt__bpe *b = e->b;
    tt__aligner f = {text, bytes, e->front, 0, 0, 0, 0};
    size_t at = 0, end = 0;
    switch (s->kind) {
    case TT__STAGE_NFC: case TT__STAGE_NFD: case TT__STAGE_NFKD: tt__front_decomposed(e, s, &f); break;
    case TT__STAGE_PRECOMPILED: tt__precompiled(b, s, text, bytes, NULL, &f); break;
    case TT__STAGE_ACCENTS: case TT__STAGE_LOWER: case TT__STAGE_CLEAN: case TT__STAGE_CJK:
    case TT__STAGE_NONSPACING: f.to = tt__map(b, s->kind, text, e->front, NULL); break;
    case TT__STAGE_PREPEND: f.to = e->front ? e->front + s->to_bytes : 0; break;
    case TT__STAGE_TRIM:
        if (s->left) at = tt__bits_end(b->bits, TT__IS_SPACE, TT__IS_SPACE, text, bytes, 0, SIZE_MAX);
        f.to = e->front > at ? e->front - at : 0;
        break;
    default: /* REPLACE, SPACES: what replaces stands for the last of what it replaces */
        for (; at < e->front; at = end) {
            bool here = s->kind == TT__STAGE_REPLACE && bytes - at >= s->from_bytes &&
                        memcmp(text + at, s->from, s->from_bytes) == 0;
            end = at + (here ? s->from_bytes : 1);
            if (s->kind == TT__STAGE_SPACES) {
                while (text[at] == ' ' && end < bytes && text[end] == ' ') end++;
                here = end - at > 1;
            }
            if (end <= e->front) f.to += here ? s->to_bytes : 1;
        }
    }
    tt__front_pass(&f);
    e->front = f.to;
}

static bool tt__is_ascii(const char *text, size_t bytes)
{
    uint8_t all = 0;
    for (size_t i = 0; i < bytes; i++) all |= (uint8_t)text[i];
    return all < 0x80;
}

/* Returns what the normalizers make of a text, which stays where it is if they change nothing. */
static const char *tt__bpe_normalize(tt__encoder *e, const char *text, size_t *bytes)
{
    const tt__bpe *b = e->b;
    bool fronts = false; /* does it matter what is the text's front? */
    for (int i = 0; i < b->n_splitters; i++) fronts |= b->splitters[i].prefix_first;
    e->front = 0;
    if (*bytes) tt__utf8_next(text, *bytes, &e->front);
    for (int i = 0, turn = 0; i < b->n_normalizers && *bytes && !e->failed; i++) {
        const tt__stage *s = &b->normalizers[i];
        tt__buffer *to = &e->normal[turn]; /* the text may be in the other one */
        const char *before = text;
        char *out = NULL;
        const bool decomposes = s->kind == TT__STAGE_NFD || s->kind == TT__STAGE_NFKD;
        const bool marks = s->kind == TT__STAGE_ACCENTS || s->kind == TT__STAGE_NONSPACING;
        if ((decomposes || marks || s->kind == TT__STAGE_CJK) && tt__is_ascii(text, *bytes)) continue;
        if (fronts) tt__front_after(e, s, text, *bytes);
        if (e->failed) break;
        if (s->kind == TT__STAGE_NFC) {
            bool stable = true;
            for (size_t at = 0; at < *bytes && stable;)
                stable = (uint8_t)text[at] < 0x80 ? (at++, true)
                       : !(b->bits[tt__utf8_next(text, *bytes, &at)] & TT__IS_UNSTABLE);
            if (!stable) text = tt__bpe_nfc(e, text, bytes, to);
        } else if (s->kind == TT__STAGE_PREPEND) {
            if (*bytes < SIZE_MAX - s->to_bytes)
                out = (char *)tt__encoder_room(e, to, *bytes + s->to_bytes, 1);
            if (!out) { e->failed = true; break; }
            memcpy(out, s->to, s->to_bytes);
            memcpy(out + s->to_bytes, text, *bytes);
            *bytes += s->to_bytes;
            text = out;
        } else if (s->kind == TT__STAGE_TRIM) {
            text = tt__trim(e, s, text, bytes);
        } else if (s->kind == TT__STAGE_PRECOMPILED) {
            out = (char *)tt__encoder_room(e, to, tt__precompiled(b, s, text, *bytes, NULL, NULL), 1);
            if (!out) break;
            *bytes = tt__precompiled(b, s, text, *bytes, out, NULL);
            text = out;
        } else if (s->kind >= TT__STAGE_NFD && s->kind <= TT__STAGE_NONSPACING) {
            out = (char *)tt__encoder_room(e, to, tt__map(b, s->kind, text, *bytes, NULL), 1);
            if (!out) break;
            *bytes = tt__map(b, s->kind, text, *bytes, out);
            if (s->kind <= TT__STAGE_NFKD) tt__sort_text(e, out, *bytes);
            text = out;
        } else {
            const size_t room = tt__replace_bytes(s, *bytes);
            if (room < SIZE_MAX) out = (char *)tt__encoder_room(e, to, room, 1);
            if (!out) { e->failed = true; break; }
            *bytes = s->kind == TT__STAGE_SPACES ? tt__replace_spaces(s, text, *bytes, out)
                                                 : tt__replace(s, text, *bytes, out);
            text = out;
        }
        turn ^= s->kind != TT__STAGE_TRIM && text != before;
    }
    return text;
}
