#pragma once
#include "../base/base.h"

/* ----------------------------------------------------------------------------------------------- Unicode */

/* Classes of code points, as BERT's tokenizer tells them apart. A space ends a word. Controls, private use
   and U+FFFD are dropped. Punctuation is a word of its own. Accents are dropped from uncased text. Marks are
   not, but decomposition (NFD) sorts a run of marks and accents by combining class: a mark of a higher
   combining class has a higher number here, from TT__CLASS_MARK on. Starters have no combining class and end
   such a run; some accents are starters. */
enum {
    TT__CLASS_LETTER = 0, TT__CLASS_SPACE, TT__CLASS_DROP, TT__CLASS_PUNCTUATION, TT__CLASS_ACCENT,
    TT__CLASS_STARTER_ACCENT, TT__CLASS_MARK
};

/* The tables of >>unicode, unpacked, and what they tell. */
typedef struct tt__unicode tt__unicode;
static tt__unicode *tt__unicode_new(tt_context *ctx);              /* to be freed */
static int tt__class(const tt__unicode *u, uint32_t c);            /* a TT__CLASS_... */
static bool tt__is_cjk(uint32_t c);                                /* a word of its own */
/* Decomposes c (NFD), drops accents and lower-cases; c itself is no accent. Returns how many code points
   result: 1 to 3. */
static int tt__fold(const tt__unicode *u, uint32_t c, uint32_t out[3]);

/* What byte-pair tokenizers ask: bits of a code point, as the regular expressions and splitters of
   `tokenizers` tell them apart, and canonical composition. */
enum {
    TT__IS_LETTER = 1, TT__IS_NUMBER = 2, TT__IS_SPACE = 4, TT__IS_PUNCTUATION = 8, TT__IS_WORD = 16,
    TT__IS_DIGIT = 32, TT__IS_UNSTABLE = 64, /* NFC may change it, or what is before it */
    TT__IS_ACCENT = 128                      /* a combining mark */
};
typedef struct tt__letters tt__letters;
static tt__letters *tt__letters_new(tt_context *ctx);              /* to be freed */
static const uint8_t *tt__letters_bits(const tt__letters *l);      /* (0x110000) bits TT__IS_... */
/* NFC of the code points of a text, in place: up to four times as many must fit into `points`, and into
   `spare`. Returns how many there are. */
static size_t tt__nfc(const tt__letters *l, uint32_t *points, size_t n, uint32_t *spare);
static uint32_t tt__compose(const tt__letters *l, uint32_t a, uint32_t b); /* 0: they do not */
/* Sorts each run of marks by combining class, in place; spare has room for as many. */
static void tt__sort_marks(const tt__letters *l, uint32_t *points, size_t n, uint32_t *spare);
static uint32_t tt__mark_rank(const tt__letters *l, uint32_t c); /* 0: none, or one that nothing moves over */
/* Decomposes a code point, also by compatibility (NFKD) if asked. Returns how many result: 1 to 18. */
enum { TT__DECOMPOSED = 18 };
static size_t tt__decompose(const tt__letters *l, uint32_t c, bool compat, uint32_t out[TT__DECOMPOSED]);
static size_t tt__lower_case(const tt__letters *l, uint32_t c, uint32_t out[2]); /* 1, or 2 of U+0130 */
/* How a code point breaks graphemes: the Unicode Standard, annex 29. Two regional indicators are apart here,
   as that makes no difference to what asks. */
enum {
    TT__GRAPHEME_OTHER, TT__GRAPHEME_CONTROL, TT__GRAPHEME_EXTEND,
    TT__GRAPHEME_EXTEND_ALONE, /* does not stand between consonants that are together */
    TT__GRAPHEME_LINKER, TT__GRAPHEME_JOINER, TT__GRAPHEME_SPACING, TT__GRAPHEME_PREPEND,
    TT__GRAPHEME_PICTURE, TT__GRAPHEME_CONSONANT,
    TT__GRAPHEME_L, TT__GRAPHEME_V, TT__GRAPHEME_T, TT__GRAPHEME_LV, TT__GRAPHEME_LVT /* of Hangul */
};
static int tt__grapheme_class(const tt__letters *l, uint32_t c);
